"""Folders that PEFT writes, read and checked against the model: what an adapter changes, by role."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.dtypes import F32, is_float
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.adapter_config import AdapterConfig, read_adapter_config
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.disk.renamed_tensors import renamed
from quire.model.load.roles import DISK_ROLES
from quire.ops.arrays import Host, equal, to_numpy


@dataclass(frozen=True)
class LowRank:
    """What is added to a matrix [n, k]: b a, and what else depends on the output alone. All f32.

    a [rank, k]; b [n, rank], the scale multiplied in; `bias` [n] of lora_B, scaled likewise; `magnitude` [n]: norms
    that the rows of the sum are brought to (DoRA, Liu et al. 2024).
    """

    a: Host
    b: Host
    bias: Host | None = None
    magnitude: Host | None = None


@dataclass(frozen=True)
class TableChange:
    """What an adapter makes of the table of tokens, or of the output head, [V, d]: one of these.

    `low`: added to it; of the table of tokens that is (b a)^T, with b [d, rank] and a [rank, V]. `own`: in its place,
    with `own_bias` [V]. `rows` [m, d]: in the place of the rows `tokens`.
    """

    low: LowRank | None = None
    own: Host | None = None
    own_bias: Host | None = None
    tokens: tuple[int, ...] = ()
    rows: Host | None = None

    @property
    def nothing(self) -> bool:
        """Whether there is no change."""
        return self.low is None and self.own is None and self.rows is None


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it lies on disk. `matrices`: role or fused matrix and layer -> what is added to it."""

    matrices: Mapping[tuple[str, int], LowRank]
    embed: TableChange
    head: TableChange


def read_adapter(folder: Path, opened: ModelHeaders, taken: Iterable[tuple[str, int]], max_rank: int) -> AdapterFile:
    """The adapter in `folder`; `taken`: roles and fused matrices, with layers, that have room for one.

    `ConfigError` or `ModelError` naming what does not fit.
    """
    file = HfConfig(read_json(folder / "adapter_config.json"), str(folder / "adapter_config.json"))
    config = read_adapter_config(file, opened.spec.vocab_size)
    _check_ranks(config, max_rank)
    return _Reader(folder, opened, config).read({module_of(opened, *place): place for place in taken})


def _check_ranks(config: AdapterConfig, most: int) -> None:
    for name, rank in {"r": config.rank, **config.ranks}.items():
        if rank > most:
            raise ConfigError(f"{config.file.where}: {name}: is {rank}; --max-lora-rank {most} must be at least that")


def module_of(opened: ModelHeaders, role: str, layer: int | None = None) -> str:
    """The name of a module as PEFT knows it."""
    family = opened.family
    name = family.names[role] if layer is None else family.module(role, opened.spec, layer)
    return name if role == "head" or name.startswith(family.prefix) else family.prefix + name


class _Reader:
    """One folder, as it is read."""

    def __init__(self, folder: Path, opened: ModelHeaders, config: AdapterConfig) -> None:
        self.folder, self.opened, self.config = folder, opened, config
        self.tensors = Checkpoint(folder, "adapter_model.safetensors")

    def read(self, known: Mapping[str, tuple[str, int]]) -> AdapterFile:
        """`known`: modules that may be adapted -> role or fused matrix, and layer."""
        tables = {module_of(self.opened, role): role for role in ("embed", "head") if role in self.opened.family.names}
        matrices: dict[tuple[str, int], LowRank] = {}
        changes: dict[str, TableChange] = {"embed": TableChange(), "head": TableChange()}
        named = adapter_parts(self.tensors, self.config)
        family = self.opened.family
        called = {module: renamed(f"{family.here(module)}.weight", family.rewrites) for module in named}
        found = {name.removesuffix(".weight"): named[module] for module, name in called.items()}
        for name in self.config.saved:
            if any(is_module(name, table) for table in tables) and not any(is_module(name, module) for module in found):
                raise self.config.file.fail("modules_to_save", f"names {name}, of which there is no tensor")
        for module, parts in found.items():
            if module in tables:
                changes[tables[module]] = self._table(tables[module], module, parts)
            elif module in known and "A" in parts:
                role, layer = known[module]
                shape = DISK_ROLES[role].shape(self.opened.spec.at(layer))
                matrices[role, layer] = self._low(module, parts, (shape[0], shape[1]))
            else:
                raise self._unknown(module, parts, known)
        return AdapterFile(matrices, changes["embed"], self._tied(changes["embed"], changes["head"]))

    def _unknown(self, module: str, parts: Parts, known: Iterable[str]) -> ModelError:
        if "own" in parts:
            return self.config.file.fail(
                "modules_to_save", f"{module} is not the table of tokens or the output head, which alone are served"
            )
        names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in known}))
        return ModelError(
            f"{self.folder}: {module}: no matrix of that name can be adapted; known: {names}, the table of tokens and "
            "the output head (those of experts, routers, latent attention take none)"
        )

    def _get(self, name: str, shape: tuple[int, ...], what: str) -> Host:
        found = self.tensors.infos[name]
        if found.shape != shape or not is_float(found.dtype):
            raise ModelError(
                f"{self.folder}: {name}: {found.dtype} {list(found.shape)} does not fit {what}, which needs "
                f"floating-point numbers {list(shape)}"
            )
        return self.tensors.tensor(name)

    def _low(self, module: str, parts: Parts, shape: tuple[int, int], kind: tuple[str, str] = ("A", "B")) -> LowRank:
        """What is added to a matrix of `shape`."""
        (n, k), rank, scale = shape, self.config.rank_of(module), self.config.scale_of(module)
        a, b = (self.tensors.infos[parts[which]].shape for which in kind)
        if a != (rank, k) or b != (n, rank):
            raise ModelError(
                f"{self.folder}: {module}: lora_A {list(a)} and lora_B {list(b)} do not fit a matrix of [{n}, {k}] and "
                f"rank {rank}, which adapter_config.json says"
            )
        low = LowRank(*(self._get(parts[w], s, module).astype(F32) for w, s in zip(kind, (a, b), strict=True)))
        extra = {w: self._get(parts[w], (n,), module).astype(F32) for w in ("bias", "magnitude") if w in parts}
        return LowRank(low.a, low.b * scale, extra["bias"] * scale if "bias" in extra else None, extra.get("magnitude"))

    def _table(self, role: str, module: str, parts: Parts) -> TableChange:
        """A change of the table of tokens, or of the output head."""
        spec = self.opened.spec
        shape = (spec.vocab_size, spec.embed_width)
        if role == "head" and spec.unit_head:
            raise ModelError(f"{self.folder}: {module}: rows of this model's head are normed; it takes no adapters")
        if "base" in parts:
            self._check_base(role, module, self._get(parts["base"], shape, module))
        if "tokens" in parts:
            tokens = next((ids for name, ids in self.config.tokens.items() if not name or is_module(name, module)), ())
            if not tokens:
                raise self.config.file.fail("trainable_token_indices", f"does not say which tokens {module} holds")
            return TableChange(
                tokens=tokens, rows=self._get(parts["tokens"], (len(tokens), shape[1]), module).astype(F32)
            )
        if "own" in parts:
            bias = self._get(parts["own_bias"], shape[:1], module).astype(F32) if "own_bias" in parts else None
            return TableChange(own=self._get(parts["own"], shape, module), own_bias=bias)
        if ("rows_A" in parts) != (role == "embed"):
            raise ModelError(f"{self.folder}: {module} has matrices of the other kind of layer")
        if role == "head":
            return TableChange(low=self._low(module, parts, shape))
        if "magnitude" in parts and spec.embed_scale != 1.0:
            raise ModelError(f"{self.folder}: {module}: DoRA of a table of tokens that the model scales is not known")
        return TableChange(low=self._low(module, parts, (shape[1], shape[0]), ("rows_A", "rows_B")))

    def _check_base(self, role: str, module: str, base: Host) -> None:
        """PEFT writes a table that is adapted beside its changes: it must be this model's."""
        claim = self.opened.claim
        name = (claim.get(role) or claim.get("embed")).get("weight")
        if name is None or not is_float(self.opened.source.infos[name].dtype):
            return  # that of a quantized model has no numbers to compare with
        own = to_numpy(self.opened.source.tensor(name))
        dtype = min(own.dtype, base.dtype, key=lambda d: d.itemsize)
        if own.shape == base.shape and not equal(own.astype(dtype, copy=False), base.astype(dtype, copy=False)):
            raise ModelError(
                f"{self.folder}: {module}.base_layer.weight is not this model's: the adapter belongs to another model, "
                "or its base was changed; merge it into that base and serve the result"
            )

    def _tied(self, embed: TableChange, head: TableChange) -> TableChange:
        """The head's change. One that is the table of tokens has that one's trained rows, as PEFT ties them."""
        if not self.opened.spec.tied_head or not head.nothing:
            return head
        if embed.rows is not None:
            return replace(embed)
        if self.config.tied and not embed.nothing:
            raise self.config.file.fail(
                "ensure_weight_tying", "is on, but there is no tensor of the output head; save it with a newer PEFT"
            )
        return head


PARTS = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "lora_embedding_A": "rows_A", "lora_embedding_B": "rows_B",
    "base_layer.weight": "base", "token_adapter.trainable_tokens_delta": "tokens", "weight": "own",
    "bias": "own_bias", "modules_to_save.weight": "own", "modules_to_save.bias": "own_bias",
}  # fmt: skip
"""Ends of tensors' names, without that of the adapter, which old files have as "default", -> what is there."""
_NAME = re.compile(rf"(?:base_model\.model\.)?(.+?)\.({'|'.join(re.escape(end) for end in PARTS)})")
Parts = Mapping[str, str]
"""Parts of one module: what (a value of `PARTS`) -> name of its tensor."""


def adapter_parts(tensors: Checkpoint, config: AdapterConfig) -> Mapping[str, Parts]:
    """Module -> its parts; `ModelError` for a tensor that is none, and for parts that do not belong together."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors.infos:
        match = _NAME.fullmatch(re.sub(r"\.default(?=\.|$)", "", name))
        if match is None:
            raise ModelError(
                f"{tensors.folder}: tensor {name} is neither a lora_A nor a lora_B of a linear layer, nor another part "
                "of an adapter that is known"
            )
        parts = found.setdefault(match[1], {})
        if PARTS[match[2]] in parts:
            raise ModelError(f"{tensors.folder}: tensor {name} is there twice, under two names")
        parts[PARTS[match[2]]] = name
    for module, parts in found.items():
        _check(set(parts), config, f"{tensors.folder}: {module}")
    if not found:
        raise ModelError(f"{tensors.folder}: adapter_model.safetensors holds no lora_A and lora_B")
    return found


def is_module(name: str, module: str) -> bool:
    """Whether `name` of a config means `module`."""
    return module == name or module.endswith(f".{name}")


def _check(have: set[str], config: AdapterConfig, what: str) -> None:
    """Refuse parts that PEFT would not have written together under this config."""
    for first, second in (("A", "B"), ("rows_A", "rows_B")):
        if (first in have) != (second in have):
            raise ModelError(f"{what} has only one of lora_A and lora_B")
    kinds = [kind for kind in ("A", "rows_A", "own", "tokens") if kind in have]
    if len(kinds) != 1:
        raise ModelError(
            f"{what} is adapted in {len(kinds)} ways; needs low-rank matrices, a tensor of its own or rows"
        )
    adapted = bool(have & {"A", "rows_A"})
    if ("magnitude" in have) != (adapted and config.dora):
        raise ModelError(f"{what}: a lora_magnitude_vector is there or not, against use_dora of adapter_config.json")
    if ("bias" in have) != ("A" in have and config.bias):
        raise ModelError(f"{what}: a bias of lora_B is there or not, against lora_bias of adapter_config.json")
    if "own_bias" in have and "own" not in have:
        raise ModelError(f"{what} has a bias without its weight")
