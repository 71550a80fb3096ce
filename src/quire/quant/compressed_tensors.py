"""Checkpoints in the compressed-tensors format of llm-compressor: packed or plain integers, and floats of 8, 6, 4 bits.

pack-quantized: `weight_packed` int32 [n, k * bits / 32], `weight_scale` [n, groups], `weight_shape` int64 [2] and, when
asymmetric, `weight_zero_point` int32 [n * bits / 32, groups] packed down the columns (older files: int8 [n, groups]).
Older files fill a word with whole codes only: of 3 bits ten, where newer ones go on in the next word.
int-quantized: `weight` int8 [n, k], `weight_scale` [n, groups], `weight_zero_point` int8 [n, groups] when asymmetric.
Packed codes are stored with 2^(bits - 1) added. The value is (code - zero) * scale.

`config_groups` may keep matrices in several ways; their `targets` say which: names, patterns ("re:...") and, after
both, kinds of layers ("Linear").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import I8, I32, I64, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.quant import fp4
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.dense import Dense
from quire.quant.fp8 import Fp8, block_size
from quire.quant.mixed import Mixed, mixed
from quire.quant.packed import (
    KINDS,
    SCALES,
    expect,
    group_count,
    grouped,
    loaded_bits,
    order_of,
    signed,
    unpack,
    unpack_rows,
)
from quire.quant.rules import matrices_with, read_pattern
from quire.quant.sparse import FORMATS, Sparse

PACKED, PLAIN, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
STRATEGIES = ("group", "channel", "tensor")


@dataclass(frozen=True)
class Compressed:
    """Integer weights. `group` columns share a scale (-1: the whole row, `whole`: the whole matrix).

    `activation_bits`: 16 unless the file says that activations are quantized. Static scales of activations are not
    used: activations are rounded by the kernels, each group at its own scale.
    """

    bits: int
    group: int
    packed: bool
    symmetric: bool
    whole: bool
    activation_bits: int = 16
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "compressed-tensors int4 g128", with a8 where activations have 8 bits."""
        group = "per row" if self.group == -1 else f"g{self.group}"
        return f"compressed-tensors int{self.bits} {group}{' a8' if self.activation_bits == 8 else ''}"

    @property
    def parts(self) -> Mapping[str, bool]:
        """Names differ between packed and plain integers."""
        own = {"weight_packed": False, "weight_shape": False} if self.packed else {"weight": False}
        return {**own, "weight_scale": True} | ({} if self.symmetric else {"weight_zero_point": False})

    @property
    def optional(self) -> Mapping[str, bool]:
        """Symmetric files may hold zeros that are all 0."""
        zeros = {"weight_zero_point": False} if self.symmetric else {}
        return {**zeros, "weight_g_idx": False, "input_scale": True, "input_zero_point": False}

    @property
    def bits_per_number(self) -> float:
        """Codes, scales and zeros."""
        return loaded_bits(self.bits, self.group, not self.symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from the codes."""
        if not self.packed:
            return shapes["weight"]
        words = shapes["weight_packed"]
        if len(words) != 2:
            return words
        k = words[1] * 32 // self.bits
        groups = shapes["weight_scale"][-1:] if 32 % self.bits and self.group > 0 else ()
        return words[0], next((g * self.group for g in groups if words[1] in self._words(g * self.group)), k)

    def _words(self, count: int) -> tuple[int, int]:
        """Words that `count` codes fill: as one stream, and as older files have them."""
        return -(-count * self.bits // 32), -(-count // (32 // self.bits))

    def _unpack(self, words: Host, count: int) -> Host:
        """Signed codes int8 [r, count] of words int32 [r, c]."""
        stream, whole = self._words(count)
        if words.shape[1] not in (stream, whole):
            raise ModelError(f"has {words.shape[1]} words of 32 bits for {count} codes; the file is damaged")
        if stream != words.shape[1]:
            codes = unpack(words.reshape(-1, 1), self.bits).reshape(len(words), -1)
            return signed(codes[:, :count], self.bits)
        return np.ascontiguousarray(unpack_rows(words, self.bits)[:, :count])

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, without a change to its numbers."""
        codes = self._codes(raw)
        n, k = codes.shape
        groups = group_count(k, self.group)
        if self.whole:
            raw = {name: np.broadcast_to(t.reshape(1, 1), (n, 1)) if t.size == 1 else t for name, t in raw.items()}
        scales = expect(raw, "weight_scale", (n, groups), *SCALES)
        order = None
        if "weight_g_idx" in raw:
            order = order_of(expect(raw, "weight_g_idx", (k,), I32, I64), k, self.group)
        zeros = self._zeros(raw, n, groups)
        return grouped(self.bits, codes, scales, zeros, self.group, order, self.activation_bits)

    def _codes(self, raw: Mapping[str, Host]) -> Host:
        if self.packed:
            if raw["weight_packed"].dtype != I32:
                raise ModelError(f"weight_packed is {raw['weight_packed'].dtype}, needs int32")
            n, k = self.shape({name: t.shape for name, t in raw.items()})
            shape = expect(raw, "weight_shape", (2,), I64, I32).tolist()
            if shape != [n, k]:
                raise ModelError(f"weight_shape is {shape}, weight_packed holds {[n, k]}; the file is damaged")
            return self._unpack(raw["weight_packed"], k)
        codes = expect(raw, "weight", raw["weight"].shape, I8)
        low = -(1 << (self.bits - 1))
        if self.bits < 8 and not low <= int(codes.min()) <= int(codes.max()) < -low:
            raise ModelError(f"weight has codes outside {low}..{-low - 1}; config.json belongs to other weights")
        return codes

    def _zeros(self, raw: Mapping[str, Host], n: int, groups: int) -> Host | None:
        if "weight_zero_point" not in raw:
            return None
        if raw["weight_zero_point"].dtype == I32:
            words = raw["weight_zero_point"]
            if words.ndim != 2 or words.shape[1] != groups or words.shape[0] not in self._words(n):
                expect(raw, "weight_zero_point", (self._words(n)[0], groups), I32)
            return np.ascontiguousarray(self._unpack(words.T, n).T)
        return expect(raw, "weight_zero_point", (n, groups), I8)


def read(config: Fields, names: Mapping[str, str]) -> QuantScheme:
    """The scheme from `quantization_config`, or that of each matrix where groups of layers differ."""
    groups = config.child("config_groups")
    if config.child("transform_config").raw:
        raise config.fail("transform_config", "cannot be served; use a checkpoint without it")
    sparsity = config.child("sparsity_config")
    sparse = sparsity.text("format", "dense")
    if sparse not in ("dense", *FORMATS):
        raise sparsity.fail("format", f"{sparse!r} cannot be read, only {', '.join(FORMATS)}")
    form = config.text("format", PACKED)
    found = [(group, _read_group(group, form)) for group in map(groups.child, groups.raw)]
    if not found and sparse != "dense":
        return Sparse(Dense(), FORMATS[sparse])
    if not found:
        raise config.fail("config_groups", "is empty; it must say how weights are quantized")
    scheme = _by_targets(config, found, names)
    if sparse == "dense":
        return scheme
    if "weight" not in scheme.parts or isinstance(scheme, Mixed):
        raise sparsity.fail("format", f"{sparse!r} beside {scheme.name} cannot be read, only beside 8-bit numbers")
    return Sparse(scheme, FORMATS[sparse])


def _by_targets(config: Fields, found: list[tuple[Fields, QuantScheme]], names: Mapping[str, str]) -> QuantScheme:
    """The format of each matrix: that of the group which names it, has a pattern for it, or has its kind of layer.

    Where several patterns match the first in alphabetical order counts, as it does for those who wrote them.
    """
    if all(scheme == found[0][1] for _, scheme in found):
        return found[0][1]
    targets = {target: scheme for group, scheme in found for target in group.texts("targets")}
    patterns = [
        (read_pattern(config, "config_groups", target.removeprefix("re:")), scheme)
        for target, scheme in sorted(targets.items())
        if target.startswith("re:")
    ]
    of = dict[str, QuantScheme]()
    for name, there in matrices_with("weight_scale", names).items():
        kind = "Embedding" if "embed" in there.rpartition(".")[2] else "Linear"
        own = [targets.get(there), *(scheme for rule, scheme in patterns if rule.match(there)), targets.get(kind)]
        scheme = next((s for s in own if s is not None), None)
        if scheme is None:
            raise config.fail("config_groups", f"no target is {there} or matches it, which is quantized")
        of[name] = scheme
    return mixed(of, found[0][1])


def _read_group(group: Fields, form: str) -> QuantScheme:
    form = group.text("format", form)
    weights = group.child("weights")
    if not weights.raw:
        raise group.fail("weights", "is missing: activations alone are quantized, which cannot be served")
    kind = weights.text("type", "int")
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    bits = weights.integer("num_bits", 8, low=1, high=16)
    if kind == "float" and form in (FLOAT, "naive-quantized"):
        if bits != 8 or strategy not in ("tensor", "channel", "block"):
            raise weights.fail(
                "num_bits", f"float of {bits} bits by {strategy}; 8 bits by tensor, channel or block can be"
            )
        return Fp8(block=block_size(weights, "block_structure") if strategy == "block" else None)
    if kind == "float" and form in fp4.FORMS:
        return fp4.FORMS[form]
    if kind == "float" and form == "mxfp8-quantized":
        return Fp8(block=(1, 32), powers=True)
    if kind != "int" or form not in (PACKED, PLAIN, "naive-quantized"):
        raise group.fail("format", f"{form!r} of {kind} cannot be read, only {PACKED}, {PLAIN} and {FLOAT}")
    if bits not in KINDS:
        raise weights.fail("num_bits", f"is {bits}, only 2 to 8 can be read; use the unquantized checkpoint")
    if strategy not in STRATEGIES:
        raise weights.fail("strategy", f"{strategy!r} cannot be read, only {', '.join(STRATEGIES)}")
    size = weights.integer("group_size") if strategy == "group" else -1
    rounded = 8 if group.child("input_activations").raw else 16
    return Compressed(bits, size, form == PACKED, weights.flag("symmetric", True), strategy == "tensor", rounded)
