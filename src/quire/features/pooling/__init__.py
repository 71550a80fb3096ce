"""Vectors of prompts: which hidden rows a step keeps, what they become, and what callers ask for."""
