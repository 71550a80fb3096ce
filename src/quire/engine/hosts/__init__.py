"""Engines on other hosts."""
