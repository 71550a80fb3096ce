"""Room for LoRA adapters in a model's linears, and the folders that are read into it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import ConfigError, ModelError
from quire.model.disk.adapter_config import adapter_scale
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.disk.opened import Opened
from quire.model.load.roles import COLUMNS, DISK_ROLES, FUSED, ROWS, Share, disk_rows
from quire.model.net.lora import NONE, Piece

ADAPTED = frozenset({"q", "k", "v", "o", "gate", "up", "down"})
"""Roles an adapter may change: not those of experts, routers, latents and heads."""


class Adapters:
    """The adapters of a model: room in its linears, and which adapter has which slot."""

    def __init__(
        self, opened: Opened, share: Share, slots: int, max_rank: int, max_rows: int, device: torch.device
    ) -> None:
        self.rows = torch.full((max_rows,), NONE, dtype=torch.int32, device=device)
        self._device = device
        self.names: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._opened, self._share = opened, share
        self.slots = slots
        self._rank = max_rank
        self._pieces: dict[tuple[str, int], Piece] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the room for all slots."""
        return sum(p.a.nbytes + p.b.nbytes for p in self._pieces.values())

    def make_room(self, roles: Iterable[str], layer: int) -> tuple[Piece, ...]:
        """Room for the adapters of the linear that `roles` are fused into, one piece per role."""
        pieces, start = [], 0
        for role in roles:
            n, k = self._share.shape(role, self._opened.spec)
            a, b = (torch.zeros(self.slots, self._rank, size, device=self._device) for size in (k, n))
            piece = self._pieces[role, layer] = Piece(a, b, self.rows, start)
            pieces.append(piece)
            start += n
        return tuple(pieces)

    def slot(self, name: str) -> int:
        """The slot of adapter `name`; "" is the model itself."""
        return self.names[name] if name else NONE

    def load(self, name: str, folder: Path) -> None:
        """Read a PEFT folder into a free slot; `ConfigError` or `ModelError` naming what does not fit.

        Nothing happens when that folder is loaded under that name already.
        """
        if self._folders.get(name) == folder.resolve():
            return
        if not name or name in self.names:
            raise ConfigError(f"adapter {name!r} is loaded from another folder; give each one a name of its own")
        if len(self.names) == self.slots:
            raise ConfigError(f"--max-loras {self.slots}: no room for {name!r} beside {', '.join(self.names)}")
        self._fill(name, next(i for i in range(self.slots) if i not in self.names.values()), folder)

    def replace(self, name: str, folder: Path) -> None:
        """Read a PEFT folder into the slot of `name`, whose adapter stays where that cannot be. No row may use it."""
        self._fill(name, self.names[name], folder)

    def _fill(self, name: str, slot: int, folder: Path) -> None:
        read = list(self._read(folder))  # whatever is wrong with them, the slot is as it was
        self._clear(slot)
        for where, a, b in read:
            self._store(slot, where, a, b)
        self.names[name], self._folders[name] = slot, folder.resolve()

    def _read(self, folder: Path) -> Iterator[tuple[tuple[str, int], Tensor, Tensor]]:
        """(role or fused matrix and layer, its A, its B times the scale), which fit."""
        scale = self._scale(HfConfig(read_json(folder / "adapter_config.json"), str(folder / "adapter_config.json")))
        tensors = Checkpoint(folder, "adapter_model.safetensors")
        found = dict(_pairs(tensors))
        bases = self._bases()
        for base, (a_name, b_name) in found.items():
            if base not in bases:
                known = ", ".join(sorted({b.rsplit(".", 1)[-1] for b in bases}))
                raise ModelError(
                    f"{folder}: {base}: no matrix of that name can be adapted; known: {known} (matrices of experts, "
                    "routers, latent attention and the output head take no adapters)"
                )
            a, b = tensors.tensor(a_name).float(), tensors.tensor(b_name).float() * scale
            self._check(bases[base][0], a, b, f"{folder}: {base}")
            yield bases[base], a, b
        if not found:
            raise ModelError(f"{folder}: adapter_model.safetensors holds no lora_A and lora_B")

    def unload(self, name: str) -> None:
        """Give the slot of `name` free; `ConfigError` when no adapter has that name. No row may use it any more."""
        if name not in self.names:
            raise ConfigError(f"adapter {name!r} is not loaded; loaded: {', '.join(self.names) or 'none'}")
        del self.names[name], self._folders[name]

    def _clear(self, slot: int) -> None:
        """An adapter may change fewer matrices, or have a smaller rank, than what was in its slot before."""
        for piece in self._pieces.values():
            piece.a[slot], piece.b[slot] = 0.0, 0.0

    def _scale(self, config: HfConfig) -> float:
        rank, scale = adapter_scale(config)
        if rank > self._rank:
            raise ConfigError(f"{config.where}: r: is {rank}; --max-lora-rank {self._rank} must be at least that")
        return scale

    def _bases(self) -> dict[str, tuple[str, int]]:
        """Module names as PEFT knows them -> (role or fused matrix, layer)."""
        family, spec = self._opened.family, self._opened.spec
        return {
            family.prefix * (not family.names["layer"].startswith(family.prefix))
            + family.names["layer"].format(layer)
            + family.names[role]: (role, layer)
            for role in family.names
            if role in DISK_ROLES and DISK_ROLES[role].kind == "linear" and DISK_ROLES[role].layer
            for layer in range(spec.layers)
            if any((part, layer) in self._pieces for part in FUSED.get(role, (role,)))
        }

    def _share_of(self, role: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of a role's A [rank, k] and B [n, rank], cut as its matrix is."""
        spec, share, axis = self._opened.spec, self._share, DISK_ROLES[role].shard
        if axis == COLUMNS:
            return a[:, share.cut(role, spec, a.shape[1])], b
        return a, b[share.cut(role, spec, len(b))] if axis == ROWS else b

    def _check(self, holder: str, a: Tensor, b: Tensor, what: str) -> None:
        n, k = DISK_ROLES[holder].shape(self._opened.spec)
        if a.dim() != 2 or len(a) > self._rank or a.shape[1] != k or b.shape != (n, len(a)):
            raise ModelError(
                f"{what}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit a matrix of [{n}, {k}] and rank "
                f"{self._rank} at most"
            )

    def _store(self, slot: int, where: tuple[str, int], a: Tensor, b: Tensor) -> None:
        holder, layer = where
        spec, family = self._opened.spec, self._opened.family
        rotated = spec.rope[layer].dim if spec.interleaved_rope else 0
        for role in FUSED.get(holder, (holder,)):
            rows = disk_rows(role, holder, spec, family.grouped_qkv and holder == "qkv", rotated)
            piece = self._pieces[role, layer]
            own_a, own_b = self._share_of(role, a, b if rows is None else b[rows])
            piece.a[slot, : len(a)] = own_a
            piece.b[slot, : len(a)] = own_b.t()


def _pairs(tensors: Checkpoint) -> Iterable[tuple[str, tuple[str, str]]]:
    """(module name, (name of its A, name of its B)); a tensor that is neither is an error."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors.infos:
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if match is None:
            raise ModelError(f"{tensors.folder}: tensor {name} is neither a lora_A nor a lora_B of a linear layer")
        found.setdefault(match[1], {})[match[2]] = name
    for base, parts in found.items():
        if set(parts) != {"A", "B"}:
            raise ModelError(f"{tensors.folder}: {base} has only one of lora_A and lora_B")
        yield base, (parts["A"], parts["B"])


def parse_modules(modules: Iterable[str]) -> Mapping[str, Path]:
    """`--lora-modules name=path ...`; `ConfigError` for anything else."""
    found: dict[str, Path] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path or name in found:
            raise ConfigError(f"--lora-modules {module!r}: needs name=folder, each name once", param="lora_modules")
        found[name] = Path(path).expanduser()
    return found
