"""Sizes that a family's own code computes from others, so that no field of config.json can give them another value.

A model whose heads or channels were dropped can only be of its family where these sizes are fields. Which are was
tried with transformers (`tests/test_prune_families.py`).
"""

from __future__ import annotations

DERIVED = {
    "head_dim": frozenset(
        {"gpt2", "gpt_bigcode", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mpt", "stablelm"}
    ),
    "intermediate_size": frozenset({"bloom", "mpt"}),
}
"""Field -> the families that have none of it: hidden_size / num_attention_heads, and a multiple of hidden_size."""
