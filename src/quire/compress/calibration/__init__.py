"""Calibration data: rows of text, hidden states before each layer, and statistics of what layers read."""
