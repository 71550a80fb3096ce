"""Checkpoints in the compressed-tensors format of llm-compressor: packed or plain integers, and floats of 8 and 4 bits.

pack-quantized: `weight_packed` int32 [n, k * bits / 32], `weight_scale` [n, groups], `weight_shape` int64 [2] and, when
asymmetric, `weight_zero_point` int32 [n * bits / 32, groups] packed down the columns (older files: int8 [n, groups]).
int-quantized: `weight` int8 [n, k], `weight_scale` [n, groups], `weight_zero_point` int8 [n, groups] when asymmetric.
Packed codes are stored with 2^(bits - 1) added. The value is (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import ModelError
from quire.ops.lazy import torch
from quire.quant import fp4
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.dense import Dense
from quire.quant.fp8 import Fp8, block_size
from quire.quant.packed import (
    KINDS,
    expect,
    group_count,
    grouped,
    loaded_bits,
    order_of,
    scale_dtypes,
    signed,
    unpack,
    unpack_rows,
)
from quire.quant.sparse import FORMATS, Sparse

if TYPE_CHECKING:
    from torch import Tensor

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
        """ "compressed-tensors int4 g128"."""
        return f"compressed-tensors {KINDS[self.bits]} {'per row' if self.group == -1 else f'g{self.group}'}"

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
        return (words[0], words[1] * 32 // self.bits) if len(words) == 2 else words

    def load(self, raw: Mapping[str, Tensor], dtype: torch.dtype) -> QWeight:
        """The weight, without a change to its numbers."""
        codes = self._codes(raw)
        n, k = codes.shape
        groups = group_count(k, self.group)
        if self.whole:
            raw = {name: t.reshape(1, 1).expand(n, 1) if t.numel() == 1 else t for name, t in raw.items()}
        scales = expect(raw, "weight_scale", (n, groups), *scale_dtypes())
        order = None
        if "weight_g_idx" in raw:
            order = order_of(expect(raw, "weight_g_idx", (k,), torch.int32, torch.int64), k, self.group)
        zeros = self._zeros(raw, n, groups)
        return grouped(self.bits, codes, scales, zeros, self.group, order, self.activation_bits)

    def _codes(self, raw: Mapping[str, Tensor]) -> Tensor:
        if self.packed:
            if raw["weight_packed"].dtype != torch.int32:
                raise ModelError(f"weight_packed is {raw['weight_packed'].dtype}, needs int32")
            n, k = self.shape({"weight_packed": tuple(raw["weight_packed"].shape)})
            shape = expect(raw, "weight_shape", (2,), torch.int64, torch.int32).tolist()
            if shape != [n, k]:
                raise ModelError(f"weight_shape is {shape}, weight_packed holds {[n, k]}; the file is damaged")
            return unpack_rows(raw["weight_packed"], self.bits)
        codes = expect(raw, "weight", tuple(raw["weight"].shape), torch.int8)
        low = -(1 << (self.bits - 1))
        if self.bits < 8 and not low <= int(codes.min()) <= int(codes.max()) < -low:
            raise ModelError(f"weight has codes outside {low}..{-low - 1}; config.json belongs to other weights")
        return codes

    def _zeros(self, raw: Mapping[str, Tensor], n: int, groups: int) -> Tensor | None:
        if "weight_zero_point" not in raw:
            return None
        if raw["weight_zero_point"].dtype == torch.int32:
            words = expect(raw, "weight_zero_point", (-(-n * self.bits // 32), groups), torch.int32)
            return signed(unpack(words.t(), self.bits), self.bits)[:, :n].t().contiguous()
        return expect(raw, "weight_zero_point", (n, groups), torch.int8)


def read(config: Fields, names: Collection[str]) -> QuantScheme:
    """The scheme from `quantization_config`, whose groups of layers must all be quantized in one way."""
    groups = config.child("config_groups")
    for unused in ("kv_cache_scheme", "transform_config"):
        if config.child(unused).raw:
            raise config.fail(unused, "cannot be served; use a checkpoint without it")
    sparsity = config.child("sparsity_config")
    sparse = sparsity.text("format", "dense")
    if sparse not in ("dense", *FORMATS):
        raise sparsity.fail("format", f"{sparse!r} cannot be read, only {', '.join(FORMATS)}")
    found: list[QuantScheme] = [_read_group(groups.child(name), config.text("format", PACKED)) for name in groups.raw]
    if not found and sparse != "dense":
        return Sparse(Dense(), FORMATS[sparse])
    if not found:
        raise config.fail("config_groups", "is empty; it must say how weights are quantized")
    if any(scheme != found[0] for scheme in found):
        names = ", ".join(sorted({s.name for s in found}))
        raise config.fail("config_groups", f"layers in different formats ({names}) cannot be read, only one for all")
    if sparse == "dense":
        return found[0]
    if "weight" not in found[0].parts:
        raise sparsity.fail("format", f"{sparse!r} beside {found[0].name} cannot be read, only beside 8-bit numbers")
    return Sparse(found[0], FORMATS[sparse])


def _read_group(group: Fields, form: str) -> QuantScheme:
    form = group.text("format", form)
    weights = group.child("weights")
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
    if kind != "int" or form not in (PACKED, PLAIN, "naive-quantized"):
        raise group.fail("format", f"{form!r} of {kind} cannot be read, only {PACKED}, {PLAIN} and {FLOAT}")
    if bits not in KINDS:
        raise weights.fail("num_bits", f"is {bits}, only 4 and 8 can be read; use the unquantized checkpoint")
    if strategy not in STRATEGIES:
        raise weights.fail("strategy", f"{strategy!r} cannot be read, only {', '.join(STRATEGIES)}")
    size = weights.integer("group_size") if strategy == "group" else -1
    rounded = 8 if group.child("input_activations").raw else 16
    return Compressed(bits, size, form == PACKED, weights.flag("symmetric", True), strategy == "tensor", rounded)
