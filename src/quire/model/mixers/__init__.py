"""Kinds of mixers, as facts: one file a kind. `layer_mixers.py` says which one a layer has."""
