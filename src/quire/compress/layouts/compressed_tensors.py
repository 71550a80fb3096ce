"""Files of compressed-tensors, which llm-compressor writes and vLLM and transformers read.

`quire.quant.compressed_tensors`, `fp8`, `fp4` and `sparse` say how tensors lie. A matrix's kind decides its format:
integers are "pack-quantized" and weights alone are rounded, but int8 with a scale a row for activations of 8 bits is
"int-quantized" (W8A8); float8 is "float-quantized", MXFP4 "mxfp4-pack-quantized". Groups of matrices in one format are
`config_groups`; the commonest has the target "Linear", the others their matrices' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.compress.layouts.base import (
    BITS,
    group_index,
    integer_bits,
    is_unquantized,
    layout_error,
    ordered_codes,
    pack,
    unquantized_tensors,
    with_bias,
)
from quire.core.errors import ConfigError
from quire.ops.arrays import to_torch
from quire.ops.lazy import torch
from quire.ops.weights import Weight
from quire.quant.codebook import MXFP4
from quire.quant.compressed_tensors import FLOAT, PACKED, PLAIN
from quire.quant.fp4 import GROUP
from quire.quant.sparse import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

NAIVE, MX, MIXED = "naive-quantized", "mxfp4-pack-quantized", "mixed-precision"
CAN_BE = {"int4": (PACKED, PLAIN, NAIVE), "int8": (PACKED, PLAIN, NAIVE), "fp8": (FLOAT, NAIVE), "table4": (MX,)}
"""Kind of a weight -> formats that hold it."""
NO_ORDER = (
    "has groups in an order of its own (act-order), which no current reader takes; quantize with "
    "static_groups = true, or write layout gptq"
)


class _Facts(NamedTuple):
    """Facts of one matrix. `scheme`: as in `config_groups`, None = not quantized; `zeros` of its `numbers` are 0."""

    scheme: dict[str, Any] | None
    sparse: bool = False
    numbers: int = 0
    zeros: int = 0


@dataclass(frozen=True)
class CompressedTensorsLayout:
    """The layout of compressed-tensors. `form`: a format for all matrices, "" = by their kind.

    `sparsity`: "sparse-24-bitmask" or "sparse-bitmask" of 8-bit and of unquantized matrices, whose zeros are left out.
    `input_scales`: f32 [1] by the names of layers whose activations are rounded at a scale fixed before; those of
    others are rounded token by token where the weight's activations have 8 bits. `cache`: `kv_cache_scheme`, whose
    scales `cache_tensors` gives.
    """

    name: str = "compressed-tensors"
    form: str = ""
    sparsity: str = ""
    input_scales: Mapping[str, Tensor] = field(default_factory=dict)
    cache: Mapping[str, Any] | None = None

    def tensors(self, base: str, weight: Weight, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Return the parts of the matrix's format; scales keep their dtype, those of float8 are f32.

        `ConfigError` for a weight with minimums, with groups in an order of its own (files had `weight_g_idx`, until
        version 0.19 of the package refused them), in another code book than MXFP4, or, quantized, without the zeros
        that `sparsity` asks for.
        """
        if is_unquantized(weight):
            sparse = self._is_sparse(weight)
            return (
                with_bias(base, self._compact(weight.codes), bias)
                if sparse
                else unquantized_tensors(base, weight, bias)
            )
        form = self._form(base, weight)
        if form == MX:
            parts = _mxfp4(self.name, base, weight)
        elif weight.kind == "fp8":
            parts = {"weight": ordered_codes(weight), "weight_scale": _float_scales(weight)[1]}
        else:
            parts = self._integers(base, weight, form == PACKED)
        if self.sparsity:
            if "weight" not in parts or weight.zeros is not None or not self._is_sparse(weight):
                raise layout_error(
                    self.name, base, f"cannot be {self.sparsity}: that takes 8-bit numbers with such zeros"
                )
            parts |= self._compact(parts.pop("weight"))
        if base in self.input_scales:
            parts["input_scale"] = self.input_scales[base]
        return with_bias(base, parts, bias)

    def config(self, matrices: Mapping[str, Weight]) -> dict[str, Any]:
        """Return the formats of groups of matrices, the unquantized ones in `ignore`."""
        found: list[tuple[dict[str, Any], list[str]]] = []
        facts = {base: self._facts(base, weight) for base, weight in matrices.items()}
        for base, fact in facts.items():
            if fact.scheme is not None:
                same = next((names for known, names in found if known == fact.scheme), None)
                if same is None:
                    found.append((fact.scheme, [base]))
                else:
                    same.append(base)
        if not found and not self.sparsity:
            raise ConfigError(f"layout {self.name}: no matrix is quantized")
        found.sort(key=lambda group: -len(group[1]))
        forms = {scheme["format"] for scheme, _ in found}
        groups = {
            f"group_{i}": {"targets": names if i else ["Linear"], **scheme} for i, (scheme, names) in enumerate(found)
        }
        config: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "dense" if not forms else next(iter(forms)) if len(forms) == 1 else MIXED,
            "config_groups": groups,
            "ignore": [base for base, fact in facts.items() if fact.scheme is None],
            "kv_cache_scheme": None if self.cache is None else dict(self.cache),
        }
        return config | ({"sparsity_config": self._sparsity(facts)} if self.sparsity else {})

    def cache_tensors(self, attention: str, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Return the scales f32 [1] of the keys and values of `attention` ("model.layers.0.self_attn")."""
        return {f"{attention}.k_scale": key, f"{attention}.v_scale": value}

    def _form(self, base: str, weight: Weight) -> str:
        can = CAN_BE.get(weight.kind, ())
        if not can or (self.form and self.form not in can):
            raise layout_error(self.name, base, f"is {weight.kind}, which {self.form or self.name} does not hold")
        return self.form or (PLAIN if _whole_int8(weight) else can[0])

    def _integers(self, base: str, weight: Weight, packed: bool) -> dict[str, Tensor]:
        bits = integer_bits(self.name, base, weight, tuple(range(2, 9)))
        if group_index(weight) is not None:
            raise layout_error(self.name, base, NO_ORDER)
        codes, zeros = ordered_codes(weight), weight.zeros
        assert weight.scales is not None
        parts = {"weight_scale": weight.scales}
        if packed:
            parts |= {"weight_packed": pack(codes, bits), "weight_shape": torch.tensor(codes.shape)}
        else:
            parts["weight"] = codes
        if zeros is not None:
            parts["weight_zero_point"] = pack(zeros.t().contiguous(), bits).t() if packed else zeros
        return parts

    def _facts(self, base: str, weight: Weight) -> _Facts:
        """Return what the config needs of one matrix, whose numbers may be given back after."""
        scheme = None if is_unquantized(weight) else self._scheme(base, weight)
        if not self.sparsity:
            return _Facts(scheme)
        zeros = int((_bytes_or_numbers(weight.codes) == 0).sum())
        return _Facts(scheme, self._is_sparse(weight), weight.codes.numel(), zeros)

    def _scheme(self, base: str, weight: Weight) -> dict[str, Any]:
        """Return what a group of `config_groups` says of a matrix, but for its targets."""
        form, floats = self._form(base, weight), weight.kind in ("fp8", "table4")
        strategy = "channel" if weight.group == weight.shape[1] else "group"
        args = _arguments(4 if weight.kind == "table4" else weight.bits or BITS.get(weight.kind, 8), floats)
        args["symmetric"] = weight.zeros is None
        if weight.kind == "fp8":
            block, scales = _float_scales(weight)
            strategy = "tensor" if scales.numel() == 1 else "channel" if block is None else "block"
            args |= {} if strategy != "block" else {"block_structure": list(block or ())}
        elif weight.kind == "table4":
            args["group_size"], strategy = GROUP, "group"
        elif strategy == "group":
            args["group_size"] = weight.group
        inputs = None
        if base in self.input_scales:
            inputs = _arguments(8, floats) | {"strategy": "tensor", "dynamic": False}
        elif weight.activation_bits == 8 and (weight.kind == "fp8" or _whole_int8(weight)) and form != PACKED:
            inputs = _arguments(8, floats) | {"strategy": "token", "dynamic": True}
            if strategy == "block":
                inputs |= {"strategy": "group", "group_size": weight.group}
        weights = args | {"strategy": strategy, "dynamic": False}
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": form}

    def _is_sparse(self, weight: Weight) -> bool:
        """Tell whether the matrix has the zeros of 2:4, or enough of any pattern to pay for a bit a number."""
        if not self.sparsity or weight.shape[1] % 8:
            return False
        there, bits = _bytes_or_numbers(weight.codes) != 0, 8 * int(weight.codes.itemsize)
        if FORMATS[self.sparsity]:
            return bool((there.view(len(there), -1, 4).sum(-1) <= 2).all())
        return int(there.sum()) * bits < there.numel() * (bits - 1)

    def _compact(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the numbers that are kept of a matrix [n, k], and where they are."""
        raw = _bytes_or_numbers(numbers)
        mask = raw != 0
        if FORMATS[self.sparsity]:  # two places of every four, of zeros the first
            first = mask.view(-1, 4).to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :2]
            mask = torch.zeros((len(first), 4), dtype=torch.bool).scatter_(1, first, True).view(mask.shape)
        kept = raw[mask].view(numbers.dtype)
        counts = mask.sum(1)
        parts = {
            "bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
            "shape": torch.tensor(mask.shape).reshape(-1, 1),
        }
        if FORMATS[self.sparsity]:
            return {"compressed": kept.view(len(mask), -1), **parts}
        return {"compressed": kept, **parts, "row_offsets": counts.cumsum(0) - counts}

    def _sparsity(self, facts: Mapping[str, _Facts]) -> dict[str, Any]:
        return {
            "format": self.sparsity,
            "sparsity_structure": "2:4" if FORMATS[self.sparsity] else "unstructured",
            "global_sparsity": sum(fact.zeros for fact in facts.values())
            / sum(fact.numbers for fact in facts.values()),
            "targets": ["Linear"],
            "ignore": [base for base, fact in facts.items() if not fact.sparse],
        }


def _arguments(bits: int, floats: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float" if floats else "int", "symmetric": True}


def _whole_int8(weight: Weight) -> bool:
    """Tell whether a weight is multiplied as W8A8: activations of 8 bits and one scale a row."""
    bits = weight.bits or BITS.get(weight.kind)
    return bits == 8 and weight.activation_bits == 8 and weight.group == weight.shape[1] and weight.zeros is None


def _bytes_or_numbers(numbers: Tensor) -> Tensor:
    """View float8 as its bytes, of which only +0 is 0: the rest of torch knows little of the type."""
    return numbers.view(torch.int8) if numbers.dtype.itemsize == 1 else numbers


def _float_scales(weight: Weight) -> tuple[tuple[int, int] | None, Tensor]:
    """Return (rows and columns of a block, or None; scales as files have them) of a float8 matrix.

    One number where all are equal, [n, 1] where a row has one; else those of square blocks where rows of a block agree,
    or of blocks of one row.
    """
    assert weight.scales is not None
    scales, side = weight.scales.float(), weight.group
    if weight.group == weight.shape[1]:
        return None, scales[:1, 0] if bool((scales == scales[0]).all()) else scales
    first = scales[::side]
    if torch.equal(first.repeat_interleave(side, 0)[: len(scales)], scales):
        return (side, side), first
    return (1, side), scales


def _mxfp4(layout: str, base: str, weight: Weight) -> dict[str, Tensor]:
    """Return weight_packed uint8 [n, k / 2], weight_scale uint8 [n, k / 32], exponents of two plus 127."""
    if weight.table is None or not torch.equal(weight.table, to_torch(MXFP4.table)):
        raise layout_error(layout, base, "is in another code book than MXFP4")
    if weight.group % GROUP or group_index(weight) is not None:
        raise layout_error(
            layout, base, f"has groups of {weight.group} columns, needs {GROUP} in the activations' order"
        )
    assert weight.scales is not None
    scales = weight.scales.float().repeat_interleave(weight.group // GROUP, 1) * MXFP4.unit
    codes = ordered_codes(weight).contiguous().view(torch.uint8)
    empty = (scales == 0) & (codes.view(*scales.shape, GROUP) & 7 == 0).all(-1)
    mantissa, exponent = torch.frexp(torch.where(empty, 1.0, scales))
    if not bool((mantissa == 0.5).all()):
        raise layout_error(layout, base, "has scales that are no powers of two, which MXFP4 needs")
    pairs = codes.view(len(codes), -1, 2)
    stored = exponent - 1 + 127
    if not 0 <= int(stored.min()) <= int(stored.max()) < 255:
        raise layout_error(layout, base, "has scales outside 2^-127..2^127")
    return {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": stored.to(torch.uint8)}
