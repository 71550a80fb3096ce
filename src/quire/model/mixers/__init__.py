"""Kinds of mixers, as facts: one file a kind. `table.py` says which one a layer has."""
