"""Ranks: processes that each have a share of a model, and what they exchange."""
