"""Room for LoRA adapters in a model's linears, and the folders that are read into it. See docs/design/adapters.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.core.config import LoraConfig
from quire.core.dtypes import I32
from quire.core.errors import ConfigError
from quire.core.exclusions.features import ADAPTER_TABLES, STAGES
from quire.core.exclusions.table import row_of
from quire.model.disk.headers import ModelHeaders
from quire.model.load.adapter_extension import Where
from quire.model.load.adapter_extensions import AdapterExtensions
from quire.model.load.adapter_files import AdapterFile, LowRank, read_adapter
from quire.model.load.roles import ADAPTED, DISK_ROLES, FUSED, Share, disk_rows
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.net.lora import NONE, LoraSlots
from quire.model.role import COLUMNS
from quire.ops.backend import Ops

if TYPE_CHECKING:
    pass


class Adapters:
    """The adapters of a model: room in its linears, and which adapter has which slot."""

    def __init__(
        self, opened: ModelHeaders, share: Share, options: LoraConfig, max_rows: int, ops: Ops, ranks: int = 1
    ) -> None:
        """`max_rows`: of a step."""
        self.rows, self.logit_rows = (ops.put(np.full(max_rows, NONE, I32)) for _ in range(2))
        self._ops = ops
        self.names: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._opened, self._share, self._ranks = opened, share, ranks
        self.slots = max(options.max_loras, len(options.lora_modules))
        self._rank = options.max_lora_rank
        self._pieces: dict[Where, LoraSlots] = {}
        self.extensions = AdapterExtensions(ops, self.slots, options.lora_extra_bytes, self.rows, self.logit_rows)

    @property
    def arrays(self) -> Mapping[str, Any]:
        """What a step's arrays of these names must be: its rows' slots, and those of its rows of logits."""
        return {"adapters": self.rows, "logit_adapters": self.logit_rows}

    @property
    def nbytes(self) -> int:
        """Bytes of the room for all slots, and of what adapters hold beyond it."""
        return sum(int(p.a.nbytes + p.b.nbytes) for p in self._pieces.values()) + self.extensions.nbytes

    def make_room(self, roles: tuple[str, ...], layer: int) -> tuple[LoraSlots, ...]:
        """Room for the adapters of the linear that `roles` are fused into, one piece per role."""
        pieces, start = [], 0
        for role in roles:
            n, k = self._share.shape(role, self._opened.spec.at(layer))
            a, b = (self._ops.zeros((self.slots, self._rank, size)) for size in (k, n))
            piece = self._pieces[role, layer] = LoraSlots(a, b, self.rows, start)
            pieces.append(piece)
            start += n
        self.extensions.know(roles, layer, tuple(pieces))
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
        file = read_adapter(folder, self._opened, self._taken(), self._rank)
        parts = {(role, layer): low for role, layer, low in self._parts(file)}
        more = any(low.magnitude is not None or low.bias is not None for low in parts.values())
        if self._ranks > self._share.world and (more or not (file.embed.nothing and file.head.nothing)):
            raise row_of(ADAPTER_TABLES, STAGES).refusal({}, subject=str(folder))
        held, low = self.extensions.planned(slot, parts, file)  # whatever is wrong, the slot is as it was
        self._clear(slot)
        for at, part in low.items():
            if at not in self._pieces:
                continue  # another stage has the layer
            piece, rank = self._pieces[at], len(part.a)
            piece.a[slot, :rank], piece.b[slot, :rank] = (self._ops.put(x) for x in (part.a, part.b.T))
        self.extensions.hold(held)
        self._opened.source.give_back()
        self.names[name], self._folders[name] = slot, folder.resolve()

    def unload(self, name: str) -> None:
        """Give the slot of `name` free; `ConfigError` when no adapter has that name. No row may use it any more."""
        if name not in self.names:
            raise ConfigError(f"adapter {name!r} is not loaded; loaded: {', '.join(self.names) or 'none'}")
        self.extensions.drop(self.names[name])
        del self.names[name], self._folders[name]

    def _clear(self, slot: int) -> None:
        """An adapter may change fewer matrices, or have a smaller rank, than what was in its slot before."""
        for piece in self._pieces.values():
            piece.a[slot], piece.b[slot] = 0.0, 0.0

    def _taken(self) -> Iterator[Where]:
        """Roles or fused matrices on disk, and layers, that have room."""
        for role in self._opened.family.names:
            if role in DISK_ROLES and DISK_ROLES[role].kind == "linear" and DISK_ROLES[role].layer:
                for layer in range(self._opened.spec.layers):
                    if any(self._has_room(part, layer) for part in FUSED.get(role, (role,))):
                        yield role, layer

    def _has_room(self, role: str, layer: int) -> bool:
        """Whether there is room here, or where another stage has the layer: all of them refuse the same adapters."""
        spec = self._opened.spec
        if layer in self._share.span(spec):
            return (role, layer) in self._pieces
        return (
            role in ADAPTED
            and DISK_ROLES[role].where(spec, layer)
            and (mixer_of(spec, layer).own_heads or role not in "qkv")
        )

    def _parts(self, file: AdapterFile) -> Iterator[tuple[str, int, LowRank]]:
        """What is added to each role: of a fused matrix the rows that are its own, in our order."""
        spec, family = self._opened.spec, self._opened.family
        for (holder, layer), low in file.matrices.items():
            rotated = spec.rope[layer].dim if spec.interleaved_rope else 0
            for role in FUSED.get(holder, (holder,)):
                rows = disk_rows(role, holder, spec.at(layer), family.grouped_qkv and holder == "qkv", rotated)
                own = low if rows is None else _taken_rows(low, rows)
                yield role, layer, in_order(own, role, layer, self._opened)


def in_order(low: LowRank, role: str, layer: int, opened: ModelHeaders) -> LowRank:
    """What is added to a role, its rows or columns in our order."""
    order = opened.family.order(role, opened.spec.at(layer))
    if order is None:
        return low
    return replace(low, a=low.a[:, order]) if DISK_ROLES[role].shard == COLUMNS else _taken_rows(low, order)


def _taken_rows(low: LowRank, rows: NDArray[np.int64]) -> LowRank:
    """What is added to the rows `rows` of a matrix."""
    bias, magnitude = (None if part is None else part[rows] for part in (low.bias, low.magnitude))
    return LowRank(low.a, low.b[rows], bias, magnitude)


def parse_modules(modules: Iterable[str]) -> Mapping[str, Path]:
    """`--lora-modules name=path ...`; `ConfigError` for anything else."""
    found: dict[str, Path] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path or name in found:
            raise ConfigError(f"--lora-modules {module!r}: needs name=folder, each name once", param="lora_modules")
        found[name] = Path(path).expanduser()
    return found
