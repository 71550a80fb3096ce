"""Pooled requests: a row of tokens that is answered with one vector instead of more tokens.
See docs/design/embeddings.md."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean", "cls"]
"""Which rows of what the head would read make the vector: that of the last token, the mean of all, or the first."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What a model gives for a pooled request.

    `width`: numbers of a vector. `normalize`: it is divided by its length. `dimensions`: the shorter lengths that the
    model was trained to be cut to (Kusupati et al. 2022), () = not said. `labels`: the classes of a model that
    classifies, whose vectors hold a logit each; `several`: more than one may hold at one time.
    `generates`: whether the model can also continue a prompt. `refused`: why no pooled request is taken, "" = they are.
    """

    kind: PoolingKind = "last"
    width: int = 0
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    several: bool = False
    generates: bool = True
    refused: str = ""


NO_VECTORS = Pooling(refused="nothing says how")
