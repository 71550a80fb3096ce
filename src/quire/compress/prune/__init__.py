"""Pruning: masks of weights, and checkpoints with heads, channels and layers taken out."""
