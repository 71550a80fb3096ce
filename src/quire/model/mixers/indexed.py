"""Latent attention to tokens that an indexer chooses (sparse attention, DeepSeek-AI 2025)."""

from __future__ import annotations

from dataclasses import replace

from quire.model.role import Role

ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.attends(layer) and s.mla.indexer.at(layer))
    for name, role in {
        "index_q": Role("linear", lambda s: (s.mla.indexer.heads * s.mla.indexer.head_dim, s.mla.q_rank)),
        "index_k": Role("linear", lambda s: (s.mla.indexer.head_dim, s.hidden)),
        "index_k_norm": Role("vector", lambda s: (s.mla.indexer.head_dim,), biased=True),
        "index_weights": Role("dense", lambda s: (s.mla.indexer.heads, s.hidden)),
    }.items()
}
"""Its matrices and vectors on disk, beside those of latent attention. Each rank has all of them: what is chosen is
chosen for all heads."""
