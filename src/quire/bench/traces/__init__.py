"""Traces of requests that others recorded: one file per layout, `read.py` finds out which."""
