"""Runs of `quire compress`: each stage of a recipe reads a model folder and writes one."""
