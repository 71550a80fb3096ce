"""Weights that are elsewhere until their layer runs."""
