"""The definitions of the ops, in torch: slow on purpose, correct by reading. Importing a module registers its ops."""

from __future__ import annotations

from quire.ops.choice import BackendFacts

DEVICE = BackendFacts("reference", lambda device: ("torch", 1), extra="train")
