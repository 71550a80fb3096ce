"""Recipes: which stages a model goes through, read from TOML and checked."""
