"""What a row of the table of GGUF's architectures holds: how the files of one are read, and written.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.gguf_layers import Kinds
from quire.model.disk.gguf_names import NAMES, READ_BELOW, REWRITES
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import GGUF_NEXTN, MtpNames
from quire.model.spec import ModelSpec


@dataclass(frozen=True)
class TensorShapes:
    """The tensors of a file by name, [rows ..., columns] each."""

    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, part: str) -> bool:
        """Whether the name of a tensor has `part` in it."""
        return any(part in name for name in self.shapes)

    def rows(self, name: str) -> int:
        """The rows of the tensor `name`, 0 without it."""
        return self.shapes.get(name, (0,))[0]


Further = Callable[[Mapping[str, Any], TensorShapes], dict[str, Any]]
"""Fields of config.json by those that were read, and by the tensors."""


@dataclass(frozen=True)
class Architecture:
    """How `general.architecture` is read.

    `model_type`: row of the families table. `interleaved`: the converter permuted the rows of queries and keys.
    `extra`: further keys it has. `windowed` and `mixture`: the row for files with a sliding window or with experts, if
    not the same. `large`: layers of the one size whose attention scale is that of hidden / heads, not of a head,
    which no key records. `names`: roles that are not called as elsewhere. `facts`: fields of config.json that have no
    key. `fixed`: keys of which one value is known. `kinds`: what each layer is, where a key has a number for each.
    `spelling`: fields that the family calls otherwise. `fields`: further fields of config.json, and their keys.
    `orders`: where our rows and columns lie (`Family.order`). `rates`: vectors that files have as exp, or as -exp
    (`rate_sign`). `written`: keys that others need, and no reader here.

    `parted`: fused matrices of folders -> what is in their place, beside those of `PARTED`. `naked`: further roles
    whose one tensor has the name of the role alone. `shapes`: of vectors that files have as matrices. `sparse`: the
    name is that of models with experts, or of those without; None: of all. `latent`: attention reads latents. `scored`:
    rows by the function by which experts are scored. `score`: that function, where it tells which name a model has.

    `each`: fields whose key has a number for each layer -> the field of all of them, the first of which is that of the
    field itself. `defaults`: fields of config.json where there is no key. `quotient`: the second field is `INNER` over
    the first. `told`: flags of config.json, and what the names of tensors have in them where one is true (or one of
    several). `normed`: the row for files that say `NORMED`. `rewrites`: those that go before all. `turns`: heads turn
    by positions. `required`: roles that others may lack. `read_only`: files of it are not written.
    `all_keys`: readers want matrices of keys and values even in layers that read another's. `made`: vectors of every
    layer that files have, and folders have not. `mtp`: what a layer that drafts has. `head`: names of the matrices
    behind pooled rows of models that classify. `bend`: the activation between these.
    `dense`: names of those of models that make vectors. `only`: which of the
    models of its rows are written so, None: all. `unbiased`: roles of which llama.cpp reads no bias.
    """

    model_type: str
    interleaved: bool = False
    extra: tuple[str, ...] = ()
    windowed: str = ""
    mixture: str = ""
    large: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kinds: Kinds | None = None
    spelling: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Callable[[ModelSpec], NDArray[np.int64]]] = field(default_factory=dict)
    rates: tuple[str, ...] = ()
    rate_sign: int = -1
    written: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quotient: tuple[str, str] | None = None
    told: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    normed: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    turns: bool = True
    required: tuple[str, ...] = ()
    read_only: bool = False
    parted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    naked: tuple[str, ...] = ()
    shapes: Mapping[str, Callable[[ModelSpec], tuple[int, ...]]] = field(default_factory=dict)
    sparse: bool | None = None
    latent: bool = False
    scored: Mapping[int, str] = field(default_factory=dict)
    score: str = ""
    joined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    further: Further | None = None
    also: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    ragged: tuple[str, ...] = ()
    each: Mapping[str, str] = field(default_factory=dict)
    tell: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    vectors: Mapping[str, str] = field(default_factory=dict)
    factors: Callable[[ModelSpec], Mapping[str, NDArray[np.float32]]] | None = None
    stored: Callable[[ModelSpec], ModelSpec] | None = None
    all_keys: bool = False
    mtp: MtpNames = GGUF_NEXTN
    made: Mapping[str, Callable[[ModelSpec], NDArray[np.float32]]] = field(default_factory=dict)
    head: tuple[str, ...] = ()
    bend: str = "tanh"
    dense: tuple[str, ...] = ()
    only: Callable[[ModelSpec], bool] | None = None
    unbiased: tuple[str, ...] = ()

    def factor(self, role: str, spec: ModelSpec) -> NDArray[np.float32] | None:
        """What the matrix or vector of a role is multiplied by in a file, one number or one for each row."""
        return None if self.factors is None else self.factors(spec).get(role)

    def called(self, spec: ModelSpec) -> dict[str, str]:
        """Names of roles of a model that are not called as elsewhere."""
        return {**self.names, **self.joined.get(spec.join, {})}

    def writes(self, spec: ModelSpec) -> bool:
        """Whether a model is written as such a file."""
        kind = self.sparse in (None, any(spec.moe.sparse)) and self.score in ("", spec.moe.routing.score)
        own = self.only is None or self.only(spec)
        return spec.family in (*self.rows, *self.also) and kind and own and not self.read_only

    @property
    def seen(self) -> tuple[Rewrite, ...]:
        """How tensors are seen that are called otherwise than roles."""
        alone = (Rewrite(rf"(blk\.\d+\.{NAMES[role]})", r"\1.weight") for role in self.naked)
        return *self.rewrites, *alone, *REWRITES

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of the families table that its files may have."""
        own = (self.model_type, self.windowed, self.mixture, self.normed, *self.scored.values())
        return tuple(dict.fromkeys(row for row in own if row))

    @property
    def known(self) -> frozenset[str]:
        """Keys below the architecture's name that are read of its files."""
        return READ_BELOW.union(self.extra, self.fixed, self.fields.values(), self.lists.values(), self.written)
