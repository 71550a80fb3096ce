"""Rows of pictures: towers, projectors, and what makes them of a checkpoint."""
