"""Kinds of mixers, as facts: one file a kind. `ModelSpec.mixer` says which one a layer has."""
