"""Reads claimed tensors, brings matrices into canonical form, and packs them; `builders` say what they are for.
See docs/design/loading.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, Dtype
from quire.core.errors import ModelError
from quire.core.files import LoadProgress
from quire.core.machine import trim_heap
from quire.model.disk.headers import ModelHeaders
from quire.model.load.adapters import Adapters
from quire.model.load.packed_cache import PackedCache
from quire.model.load.placement import InMemory, LayerKeeper, Unplaced
from quire.model.load.roles import ADAPTED, DISK_ROLES, Share, disk_rows, local_spec, shard, shard_vector
from quire.model.net.parts import Linear
from quire.model.role import COLUMNS, ROWS
from quire.model.stream_roles import IN_FILE
from quire.ops.arrays import (
    AnyArray,
    Array,
    Host,
    as_f32,
    cast_to,
    concat,
    contiguous,
    dtype_of,
    to_numpy,
    unit_rows,
    zeros_of,
)
from quire.ops.backend import Ops
from quire.ops.weights import labelled
from quire.quant.base import Quantizer, QuantScheme, QWeight
from quire.quant.registry import DENSE, matrix_scheme
from quire.quant.registry import load as load_matrix

T = TypeVar("T")


@dataclass(frozen=True)
class MatrixForm:
    """What matrices become.

    `dtype`: of those that are not quantized; `target`: the format the others are brought to, in groups of `group`
    columns, or None: that of the file; `activations`: "auto", "int8" or "int16"; `runs`: columns that are summed over
    ranks are cut into runs (`load.parts`). `narrow`: matrices may be kept in 12 bits.
    """

    dtype: Dtype
    target: Quantizer | None = None
    group: int = 32
    activations: str = "auto"
    runs: bool = False
    narrow: bool = True


class WeightReader:
    """Reads and packs one rank's share of what a checkpoint was found to hold; keeps the account of each role.

    `local`: the shape of that share, beside `opened.spec`, the shape of what lies on disk.
    """

    def __init__(
        self,
        opened: ModelHeaders,
        ops: Ops,
        form: MatrixForm,
        share: Share,
        progress: LoadProgress | None,
        adapters: Adapters | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        self.keeper: LayerKeeper = InMemory()
        self.opened, self.ops, self.form, self.share = opened, ops, form, share
        self.local = local_spec(opened.spec, share)
        self.adapters, self.cache = adapters, cache
        self.report: dict[str, tuple[str, int]] = {}
        self._made: dict[str, Any] = {}
        self._progress = progress or (lambda done, total, what: None)
        self._names: dict[int | None, list[str]] = {}
        span = share.span(opened.spec)
        for (role, place), parts in opened.claim.parts.items():
            if (place.layer is None or place.layer in span) and role not in IN_FILE:
                self._names.setdefault(place.layer, []).extend(parts.values())
        self._first = span.start
        self._done, self._total = 0, sum(i.nbytes for i in opened.source.infos.values())

    @contextmanager
    def part(self, layer: int | None = None) -> Iterator[None]:
        """While a layer is made (None: what comes before it) the system reads the next; then its pages are given back.

        So the memory of a load is that of the packed model and of one layer, and a disk does not wait for the packing.
        """
        following = self._names.get(self._first if layer is None else layer + 1, [])
        following = following + self._names.get(None, []) if layer is None else following
        asking = Thread(target=self.opened.source.read_ahead, args=(following,), daemon=True)
        asking.start()
        yield
        asking.join()
        self.opened.source.give_back()
        trim_heap()

    def of(self, share: Share) -> WeightReader:
        """Reader of another share, in one account."""
        made = copy(self)
        made.share, made.local = share, local_spec(self.opened.spec, share, heads=False)
        return made

    def place(self, value: T) -> T:
        """`value` with all of its arrays where ops read them."""
        moved: T = self.ops.place(value)
        return moved

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What several layers have in common, made and placed when it is asked for first."""
        if name not in self._made:
            self._made[name] = self.place(make())
        found: T = self._made[name]
        return found

    def count(self, role: str, kind: str, nbytes: int) -> None:
        """Add `nbytes` of `kind` to the account of `role`."""
        self.report[role] = (kind, nbytes + self.report.get(role, ("", 0))[1])

    def tell(self, what: str, last: bool = False) -> None:
        """Report how far reading is, and that `what` is done; after the `last` nothing is left."""
        self._progress(self._total if last else self._done, self._total, what)

    def vector(self, role: str, layer: int | None = None, part: str = "weight", again: bool = False) -> Unplaced | None:
        """The weight of a norm or of a convolution as f32, or its `part` "bias"; None when the checkpoint has none.

        `again`: it was read before, and is counted.
        """
        name = self.opened.claim.get(role, layer).get(part)
        if name is None:
            return None
        tensor = as_f32(self.read(name)) + float(part == "weight" and self.opened.spec.stored_less_one(role))
        spec = self.opened.spec.at(layer)
        tensor = tensor.reshape(-1) if len(DISK_ROLES[role].shape(spec)) == 1 else tensor
        if role in self.opened.family.rates:
            tensor = self._logarithm(name, tensor)
        if (order := self.opened.family.order(role, spec)) is not None:
            tensor = tensor[order]
        tensor = shard_vector(tensor, role, spec, self.share.of_role(role))
        if not again:
            self.count(role if DISK_ROLES[role].biased else "norms", "f32", tensor.nbytes)
        return tensor

    def _logarithm(self, name: str, rates: AnyArray) -> Host:
        """x of the vector -exp(x), or exp(x), that the file has as `name`."""
        sign = self.opened.family.rate_sign
        positive = to_numpy(rates) if sign > 0 else -to_numpy(rates)
        if not (positive > 0).all():
            side = "below" if sign < 0 else "above"
            raise ModelError(f"{self.opened.folder}: {name} holds a number that is not {side} 0")
        return np.log(positive)

    def table(self, role: str) -> Unplaced:
        """The rank's rows of a look-up table in the compute dtype, copied out of the mapped file."""
        names, spec = self.opened.claim.get(role), self.opened.spec
        raw = {s: self.read(name) for s, name in names.items()}
        rows = self.share.cut(role, spec, spec.vocab_size) if DISK_ROLES[role].shard == ROWS else slice(None)
        tensor = _as_table(raw, matrix_scheme(self.opened.scheme, names), self.form.dtype, rows)
        self.count(role, dtype_of(tensor).name, tensor.nbytes)
        return tensor

    def linear(self, roles: tuple[str, ...], layer: int | None, rows: NDArray[np.int64] | None = None) -> Linear:
        """The matrices of `roles` quantized, fused by rows, put in the order `rows` and packed, with their biases."""
        if rows is None and len(runs := self._runs(roles, layer)) > 1:
            first, *more = [self.linear(run, layer) for run in runs]
            return replace(first, more=tuple(more))
        shape = self._shape(roles, layer, rows)
        kept = None if self.cache is None else self.cache.find(f"{layer}.{'+'.join(roles)}", shape)
        if kept is not None:
            packed, bias, label = kept.packed, kept.bias, kept.label
        else:
            weight, bias = self.matrix(roles, layer)
            if rows is not None:
                weight, bias = weight.take_rows(rows), None if bias is None else bias[rows]
            with self.naming(next(iter(self.opened.claim.get(self._holder(roles[0], layer), layer).values()))):
                packed = weight.pack(self.ops, self.form.narrow)
            label = labelled(weight.label, packed)
            if self.cache is not None:
                self.cache.put(f"{layer}.{'+'.join(roles)}", packed, bias)
        if bias is not None:
            self.count("biases", "f32", bias.nbytes)
        tied = roles == ("embed",) and not self.opened.claim.get("head")
        self.count("head" if tied else "+".join(roles), label, packed.nbytes)
        if self.adapters is None or layer is None or rows is not None or not ADAPTED.issuperset(roles):
            return Linear(packed, bias)
        return Linear(packed, bias, self.adapters.make_room(roles, layer))

    def matrix(
        self, roles: tuple[str, ...], layer: int | None, expert: int | None = None
    ) -> tuple[QWeight, Unplaced | None]:
        """The matrices of `roles` quantized and fused by rows, and their biases (zeros where one has none)."""
        holders = {role: self._holder(role, layer, expert) for role in roles}
        wide = all(DISK_ROLES[role].wide for role in roles)
        whole = {holder: self._whole(holder, layer, expert, wide) for holder in dict.fromkeys(holders.values())}
        parts = [self._part(role, holder, *whole[holder], layer) for role, holder in holders.items()]
        one = next((b for _, b in parts if b is not None), None)
        bias = None
        if one is not None:
            bias = concat([zeros_of(one, w.shape[0]) if b is None else b for w, b in parts])
        return QWeight.cat_rows([w for w, _ in parts]), bias

    def whole(self, role: str, layer: int | None) -> tuple[QWeight, Unplaced | None]:
        """The matrix of `role` of all ranks, quantized, and its bias."""
        holder = self._holder(role, layer)
        return self._ordered(role, holder, *self._whole(holder, layer, None, DISK_ROLES[role].wide), layer)

    def dense(self, role: str, layer: int | None) -> Linear:
        """A matrix whose products are those of f32: a router's choice is all or nothing, so nothing may be rounded."""
        names = self.opened.claim.get(role, layer)
        weight: Array = self.read(names["weight"])
        packed = self.ops.pack_exact(as_f32(weight))
        bias: Unplaced = cast_to(self.read(names["bias"]), F32, copy=True) if "bias" in names else None
        self.count(role, packed.kind.removesuffix("_f32"), packed.nbytes + (0 if bias is None else bias.nbytes))
        return Linear(packed, bias)

    def _shape(self, roles: tuple[str, ...], layer: int | None, rows: NDArray[np.int64] | None) -> tuple[int, int]:
        """[n, k] of the matrices of `roles` fused, or of the rows `rows` of them."""
        shapes = [self.share.of_role(role).shape(role, self.opened.spec.at(layer)) for role in roles]
        return sum(shape[0] for shape in shapes) if rows is None else len(rows), shapes[0][1]

    def _holder(self, role: str, layer: int | None, expert: int | None = None) -> str:
        """The matrix on disk that holds a role; the table of tokens holds a tied head."""
        tied = role == "head" and not self.opened.claim.get("head")
        return "embed" if tied else self.opened.claim.holder(role, layer, expert)

    def _runs(self, roles: tuple[str, ...], layer: int | None) -> list[tuple[str, ...]]:
        """`roles` cut where the format on disk changes, so that each run can be one matrix."""

        def form(role: str) -> str:
            return matrix_scheme(self.opened.scheme, self.opened.claim.get(self._holder(role, layer), layer)).name

        return [tuple(run) for _, run in groupby(roles, key=form)]

    def _part(
        self, role: str, holder: str, weight: QWeight, bias: Unplaced | None, layer: int | None
    ) -> tuple[QWeight, Unplaced | None]:
        """The rows of one role, in our order, and of those this rank's."""
        weight, bias = self._ordered(role, holder, weight, bias, layer)
        return shard(weight, bias, role, self.opened.spec.at(layer), self.share.of_role(role))

    def _ordered(
        self, role: str, holder: str, weight: QWeight, bias: Unplaced | None, layer: int | None
    ) -> tuple[QWeight, Unplaced | None]:
        """The rows of one role, in our order."""
        order = self.opened.family.order(role, self.opened.spec.at(layer))
        if order is not None and DISK_ROLES[role].shard == COLUMNS:
            return weight.take_cols(order), bias
        rows = self.disk_rows(role, holder, layer)
        if rows is None:
            return weight, bias
        return weight.take_rows(rows), None if bias is None else bias[rows]

    def disk_rows(self, role: str, holder: str, layer: int | None) -> NDArray[np.int64] | None:
        """Rows [n] int64 of the matrix `holder` on disk that are `role`, in our order; None: all as they lie."""
        spec = self.opened.spec.at(layer)
        if layer is None:
            return None
        rotated = spec.rope[layer].dim if spec.interleaved_rope else 0
        rows = disk_rows(role, holder, spec, self.opened.family.grouped_qkv and holder == "qkv", rotated)
        order = self.opened.family.order(role, spec) if DISK_ROLES[role].shard != COLUMNS else None
        return rows if order is None else order if rows is None else rows[order]

    def _whole(self, holder: str, layer: int | None, expert: int | None, wide: bool) -> tuple[QWeight, Unplaced | None]:
        """A matrix as it lies on disk, [n, k] in its final format, not quantized here if `wide`, and its bias as
        f32."""
        names = self.opened.claim.get(holder, layer, expert)
        raw = {s: self.read(name) for s, name in names.items() if s != "bias"}
        scheme = matrix_scheme(self.opened.scheme, names)
        if self.opened.family.transposed and layer is not None and scheme is DENSE:
            raw = {s: contiguous(t.T) for s, t in raw.items()}
        if holder == "head" and self.opened.spec.unit_head:
            raw["weight"] = unit_rows(as_f32(raw["weight"]))
        with self.naming(next(iter(names.values()))):
            if self.form.target is None or wide:
                dtype = self.form.dtype
                weight = load_matrix(scheme, raw, dtype, self.ops.float8_activations(dtype))
            else:
                target = self.form.target.head if holder in ("head", "embed") else self.form.target
                weight = target.at_pack(to_numpy(raw["weight"]), self.form.group)
            weight = _fitted(weight, DISK_ROLES[holder].shape(self.opened.spec.at(layer)), self.form.activations)
        bias = cast_to(self.read(names["bias"]), F32, copy=True) if "bias" in names else None
        return weight, bias

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """A `ModelError` of what is done here says that it is of `what`, unless one inside has said that."""
        try:
            yield
        except ModelError as error:
            if error.message.startswith(f"{self.opened.folder}: "):
                raise
            raise ModelError(f"{self.opened.folder}: {what}: {error.message}") from None

    def read(self, name: str) -> AnyArray:
        """The tensor `name` as it lies on disk; the caller must not write to it."""
        self._done += self.opened.source.infos[name].nbytes
        return self.opened.source.tensor(name)


def _fitted(weight: QWeight, shape: tuple[int, ...], activations: str) -> QWeight:
    """The weight with the activations `--activations` asks for; `ModelError` when it is not of `shape`."""
    if weight.shape != shape:
        raise ModelError(f"is {list(weight.shape)}, the config asks for {list(shape)}")
    return weight if activations == "auto" else weight.with_activations(int(activations.removeprefix("int")))


def _as_table(raw: Mapping[str, AnyArray], scheme: QuantScheme, dtype: Dtype, rows: slice) -> Array:
    """The numbers of some rows of a look-up table, which are copied or taken out of their format."""
    if "weight" in raw:
        return cast_to(raw["weight"][rows], dtype, copy=True)
    return cast_to(load_matrix(scheme, raw, dtype, 0).take_rows(rows).dequantize(), dtype)
