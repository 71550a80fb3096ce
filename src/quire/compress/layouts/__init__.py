"""Layouts of quantized matrices in files: one module for each layout that other programs read."""
