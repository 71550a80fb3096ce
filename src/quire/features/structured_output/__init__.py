"""Structured output: sequences that wait for grammars, masks of logits, and grammars that are compiled."""
