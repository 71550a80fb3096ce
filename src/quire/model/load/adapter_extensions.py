"""What adapters hold beyond low-rank matrices of layers: factors, biases, tables of tokens and output heads.

It is made when an adapter is loaded, and given back with it. The decoder that has it (`decoder`) shares all weights
with the model's, and runs in steps that have a row of such an adapter; others never meet it. There, too, a row's
numbers come from that row alone, and rows of others keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, I32
from quire.core.errors import ConfigError
from quire.core.tree_map import rebuilt
from quire.model.batch import Batch
from quire.model.load.adapter_extension import (
    AdapterExtension,
    Base,
    Where,
    cut,
    head_change,
    own_rows,
    settled,
    table_bytes,
)
from quire.model.load.adapter_files import AdapterFile, LowRank
from quire.model.net.decoder import Decoder
from quire.model.net.lora import NONE, Change, Factors, KeepRows, LoraSlots, Shift
from quire.model.net.parts import Embedding, Linear
from quire.ops.arrays import AnyArray, Host, cast_to, dtype_of
from quire.ops.backend import Ops

L = TypeVar("L", bound=AnyArray)


@dataclass(frozen=True)
class ActiveExtensions:
    """Extensions by slot, and what they do together to each linear, by the place of its first role."""

    by_slot: Mapping[int, AdapterExtension]
    before: Mapping[Where, Factors]
    after: Mapping[Where, Shift]

    @property
    def heads(self) -> bool:
        """Whether one has an output head of its own."""
        return any(e.head is not None and e.head.own is not None for e in self.by_slot.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, the step's arrays aside."""
        together = [f.excess for f in self.before.values()] + [s.shift for s in self.after.values()]
        return sum(e.nbytes for e in self.by_slot.values()) + sum(int(t.nbytes) for t in together)


class AdapterExtensions:
    """Extensions of the adapters that are loaded. `version` changes with them."""

    def __init__(self, ops: Ops, slots: int, limit: int, rows: Any, logit_rows: Any) -> None:
        """`limit`: bytes they may take together; `rows` and `logit_rows` [tokens] int32: the slots of a step's rows."""
        self.version = 0
        self._slots, self._limit = slots, limit
        self._ops, self._rows, self._logit_rows = ops, rows, logit_rows
        self._ones = ops.put(np.ones((len(rows), 1), F32))
        self._linears: dict[Where, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        self._first: dict[int, Where] = {}
        self._held = ActiveExtensions({}, {}, {})
        self._kept: Any = None
        self._base: Base | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return self._taken(self._held)

    @property
    def left(self) -> int:
        """Bytes that others may still take."""
        return self._limit - self.nbytes

    def __contains__(self, slot: int) -> bool:
        return slot in self._held.by_slot

    def attach(self, base: Base) -> None:
        """Say which model it is, once it is loaded."""
        self._base = base

    def know(self, roles: tuple[str, ...], layer: int, pieces: tuple[LoraSlots, ...]) -> None:
        """Note that there is a linear of these roles, with such room for low-rank matrices."""
        self._linears[roles[0], layer] = roles, tuple(p.b.shape[2] for p in pieces)
        self._first[id(pieces[0])] = roles[0], layer

    def planned(
        self, slot: int, parts: Mapping[Where, LowRank], file: AdapterFile
    ) -> tuple[ActiveExtensions, Mapping[Where, LowRank]]:
        """What is held with an adapter in `slot`, for `hold`, and its low-rank matrices as rows must add them.

        `ConfigError` when it is too much, `ModelError` for numbers that cannot be. Nothing has changed yet.
        """
        others = {i: extension for i, extension in self._held.by_slot.items() if i != slot}
        assert self._base is not None, "a model says what it is before adapters are loaded"
        spec, share = self._base.spec, self._base.share
        plain = all(part.magnitude is None and part.bias is None for part in parts.values())
        if plain and file.embed.nothing and file.head.nothing:
            own = {at: cut(at[0], part, (None, None), spec.at(at[1]), share)[0] for at, part in parts.items()}
            return self._together(others), own
        base, rows = self._base, len(self._rows)
        self._check(sum(e.nbytes for e in others.values()) + table_bytes(base, file.embed, file.head))
        low, excess, shift = dict[Where, LowRank](), dict[Where, Host](), dict[Where, Host]()
        for at, part in parts.items():
            what = f"{at[0]} of layer {at[1]}"
            whole, *more = settled(part, lambda at=at: base.weights(*at), what)  # type: ignore[misc]
            low[at], factors, added = cut(at[0], whole, (more[0], more[1]), spec.at(at[1]), share)
            excess |= {} if factors is None else {at: factors}
            shift |= {} if added is None else {at: added}
        embed = own_rows(base, slot, file.embed, rows)
        others[slot] = AdapterExtension(excess, shift, embed, head_change(base, file.head, rows, self._ones))
        held = self._together(others)
        self._check(self._taken(held))
        return held, low

    def _taken(self, held: ActiveExtensions) -> int:
        """Add what keeps the rows of heads."""
        return held.nbytes + (self._base.kept_bytes(len(self._rows)) if held.heads and self._base is not None else 0)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise ConfigError(
                f"--lora-extra-bytes {self._limit}: with this adapter, adapters hold {nbytes:,} bytes beyond low-rank "
                "matrices of layers (embeddings, output heads, magnitudes, biases); raise it, or unload another"
            )

    def _together(self, by_slot: Mapping[int, AdapterExtension]) -> ActiveExtensions:
        """`by_slot`, and the numbers of all slots beside each other for each linear that one of them changes."""
        excess = self._stacked({slot: e.excess for slot, e in by_slot.items()})
        shift = self._stacked({slot: e.shift for slot, e in by_slot.items()})
        before = {at: Factors(numbers, self._rows) for at, numbers in excess.items()}
        return ActiveExtensions(
            by_slot, before, {at: Shift(numbers, self._rows, self._ones) for at, numbers in shift.items()}
        )

    def _stacked(self, vectors: Mapping[int, Mapping[Where, Host]]) -> dict[Where, Any]:
        """[slots, 1, width] of each linear that has one, zeros where a slot or a role has none."""
        found: dict[Where, Any] = {}
        for first, (roles, widths) in self._linears.items():
            parts = {
                (slot, i): numbers[role, first[1]]
                for slot, numbers in vectors.items()
                for i, role in enumerate(roles)
                if (role, first[1]) in numbers
            }
            if parts:
                together = np.zeros((self._slots, 1, sum(widths)), F32)
                for (slot, i), vector in parts.items():
                    start = sum(widths[:i])
                    together[slot, 0, start : start + widths[i]] = vector
                found[first] = self._ops.put(together)
        return found

    def hold(self, held: ActiveExtensions) -> None:
        """Hold this extension from now on. No step that has a row of one that changes is under way."""
        self._held = held
        self.version += 1
        if not held.heads or self._base is None:
            self._kept = None
        elif self._kept is None:
            base, rows = self._base, len(self._rows)
            self._kept = base.ops.zeros((rows, base.spec.embed_width), base.row_dtype)

    def drop(self, slot: int) -> None:
        """Give back what the adapter in `slot` holds."""
        if slot in self:
            self.hold(self._together({i: e for i, e in self._held.by_slot.items() if i != slot}))

    def decoder(self, decoder: Decoder) -> Decoder:
        """`decoder`, the model's or one with some of its layers, with all that is held now."""
        extensions = self._held.by_slot.values()
        embeds = tuple(e.embed for e in extensions if e.embed is not None)
        head: tuple[Change, ...] = tuple(c for e in extensions if e.head is not None for c in e.head.changes)
        if self._kept is not None:
            head = (*head, KeepRows(self._kept))
        return replace(
            decoder,
            layers=rebuilt(decoder.layers, self._extended),
            embed=rebuilt(decoder.embed, lambda part: _with(part, Embedding, changes=embeds)),
            head=rebuilt(decoder.head, lambda part: _with(part, Linear, adapters=head)),
        )

    def _extended(self, part: Any) -> Any:
        if not isinstance(part, Linear) or not part.adapters:
            return part
        at = self._first[id(part.adapters[0])]
        before = (self._held.before[at],) if at in self._held.before else ()
        after = (self._held.after[at],) if at in self._held.after else ()
        more = tuple(self._extended(other) for other in part.more)
        return replace(part, adapters=(*before, *part.adapters, *after), more=more)

    def look_up(self, batch: Batch) -> None:
        """Before a step: which rows have which of the adapters. The slots of rows and of logits are there."""
        tokens, logits = batch.tokens, len(batch.logit_rows)
        for slot, extension in self._held.by_slot.items():
            if extension.embed is not None:
                extension.embed.look_up(tokens, self._rows[: len(tokens)])
            if extension.head is not None:
                extension.head.mine[:logits] = NONE
                extension.head.mine[:logits][self._logit_rows[:logits] == slot] = 0

    def after(self, logits: L, slots: NDArray[np.int32], decoder: Decoder, batch: Batch) -> L:
        """After a step: its logits [R, V]; rows of adapters with a head of their own get that one's. slots [R]."""
        for slot, extension in self._held.by_slot.items():
            own = None if extension.head is None else extension.head.own
            rows = np.flatnonzero(slots == slot)
            if own is None or self._kept is None or not len(rows):
                continue
            ops, changed = decoder.ops, cast(Any, logits)
            found = own(ops, ops.pick_rows(self._kept[: len(logits)], ops.put(rows.astype(I32))))
            for change in decoder.head_changes:
                found = change(ops, found, batch)
            changed[rows] = cast_to(found, dtype_of(logits))
        return logits


def _with(part: Any, kind: type[Linear | Embedding], **changes: Any) -> Any:
    """`part` with `changes`, where it is of that kind."""
    return replace(part, **changes) if isinstance(part, kind) else part
