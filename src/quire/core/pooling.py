"""Pooled requests: a row of tokens that is answered with one vector instead of more tokens.
See docs/design/embeddings.md."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean", "cls", "splade", "all", "alignment"]
"""Which rows of what the head would read make the vector: that of the last token, the mean of all, or the first.

"splade": a weight for each token of the vocabulary, of the logits of all rows (`Splade`).

"all" is of requests alone: the rows of all tokens behind each other, in place of a vector. So is "alignment": where
each token of a text was heard (`core.alignment`), which no hidden row says.
"""


class DenseModule(msgspec.Struct, frozen=True):
    """A dense layer behind the pooled row: where it lies below the model's folder, how wide it is, its activation."""

    folder: str
    width: int
    activation: str


class Splade(msgspec.Struct, frozen=True):
    """How logits become the weights of a sparse vector: log(1 + relu(logit)) of each row, of which each token of the
    vocabulary has the largest (Formal et al. 2021b), or `sums` their sum (Formal et al. 2021a). `twice`: log(1 + x) is
    taken of that once more (Geng et al. 2025)."""

    sums: bool = False
    twice: bool = False


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What a model gives for a pooled request.

    `width`: numbers of a vector. `normalize`: it is divided by its length. `dimensions`: the shorter lengths that the
    model was trained to be cut to (Kusupati et al. 2022), () = not said; `cut`: the length of a vector where a request
    says none, 0 = `width`. `labels`: the classes of a model that
    classifies, whose vectors hold a logit each; `several`: more than one may hold at one time. `raw`: scores are logits
    and no probabilities. `pairs`: two texts are read as the tokenizer joins a pair, else behind each other. `dense`:
    layers behind the pooled row. `splade`: how a sparse vector is made, where `kind` says so. `prompts`: what
    stands before a text by the name of its task, `prompt` the usual one. `longest`: tokens of a text that the model
    was made for, 0 = not said. `generates`: whether the model can also continue a prompt. `refused`: why no pooled
    request is taken, "" = they are.
    """

    kind: PoolingKind = "last"
    width: int = 0
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    cut: int = 0
    labels: tuple[str, ...] = ()
    several: bool = False
    raw: bool = False
    pairs: bool = False
    dense: tuple[DenseModule, ...] = ()
    splade: Splade = Splade()
    prompts: dict[str, str] = {}
    prompt: str = ""
    longest: int = 0
    generates: bool = True
    refused: str = ""


NO_VECTORS = Pooling(refused="nothing says how")
