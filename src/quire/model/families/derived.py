"""Sizes that a family's own code computes from others, so that no field of config.json can give them another value.

A model whose heads or channels were dropped can only be of its family where these sizes are fields. Which are was
tried with transformers (`tests/compress/prune/test_prune_families.py`).
"""

from __future__ import annotations

DERIVED = {
    "head_dim": frozenset(
        {"gpt2", "gpt_bigcode", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mpt", "stablelm", "helium"}
    ),
    "intermediate_size": frozenset({"bloom", "mpt"}),
    "short_factor": frozenset({"phi3"}),
}
"""Field -> the families that have none of it, or no other than the usual one.

`head_dim` is hidden_size / num_attention_heads, `intermediate_size` a multiple of hidden_size, and the length of the
rope's `short_factor` is checked against the former quotient.
"""

EVEN_HEADS = frozenset({"llama", "gemma2", "gemma3_text", "internlm3", "vaultgemma", "arcee"})
"""Families whose code in transformers refuses a number of heads that does not divide hidden_size, head_dim or not."""
