"""Sizes of models that draft for another and read its keys, values and hidden rows."""

from __future__ import annotations

from dataclasses import dataclass

OF_TARGET = -1
"""In `ModelSpec.kv_source`: the layer reads keys and values of the model that is drafted for."""


@dataclass(frozen=True)
class AssistantSizes:
    """`width`: numbers of a hidden row of the model that is drafted for, 0 = the model drafts for none.

    `clusters`: groups of as many tokens each; only those of the `chosen` likeliest have logits. 0 = all tokens have.
    """

    width: int = 0
    clusters: int = 0
    chosen: int = 0


NO_ASSISTANT = AssistantSizes()
