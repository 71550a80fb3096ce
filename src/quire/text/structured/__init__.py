"""Structured output: grammars (llguidance), what a sequence may say next, and how it comes to an end in time."""
