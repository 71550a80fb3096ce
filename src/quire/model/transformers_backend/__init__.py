"""Causal models without a row in the table of families, by the modelling code of the installed transformers."""
