"""Rows of images: towers, projectors, and what makes them of a checkpoint."""
