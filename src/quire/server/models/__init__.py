"""A server of several models."""
