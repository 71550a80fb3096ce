"""Files of bitsandbytes: NF4 with double quantization (Dettmers et al. 2023) and LLM.int8() (Dettmers et al. 2022).

`quire.quant.bitsandbytes` says how tensors lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.compress.layouts.base import (
    facts_by_matrix,
    group_index,
    integer_bits,
    is_unquantized,
    layout_error,
    ordered_codes,
    unquantized_tensors,
    with_bias,
)
from quire.core.errors import ConfigError
from quire.ops.arrays import to_torch
from quire.ops.lazy import torch
from quire.ops.weights import Weight
from quire.quant.codebook import NF4, NF4_NUMBERS

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of a block that bitsandbytes' kernels take."""
NESTED = 256
"""Scales that share a scale."""


@dataclass(frozen=True)
class BitsAndBytesLayout:
    """The layout of bitsandbytes.

    `double`: scales of NF4 are quantized again to 8 bits, which takes 0.4 bits a number less in blocks of 64. That
    rounds a scale by up to 0.7 % (half the widest gap of `dynamic_map`) of the largest distance from the mean that its
    256 have: the numbers of the file are those of its reader, not those of the weight. `dtype`: that of unquantized
    numbers, to which bitsandbytes widens; `threshold`: activations beyond it are outliers of LLM.int8().
    """

    name: str = "bitsandbytes"
    double: bool = True
    dtype: str = "bfloat16"
    threshold: float = 6.0

    def tensors(self, base: str, weight: Weight, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Return tensors by kind. NF4: weight uint8 [n * k / 2, 1], absmax, code book and description; int8: weight,
        SCB f32 [n].

        `ConfigError` for other kinds, for int8 whose groups are not whole rows and for act-order.
        """
        if is_unquantized(weight):
            return unquantized_tensors(base, weight, bias)
        if group_index(weight) is not None:
            raise layout_error(self.name, base, "has groups in an order of its own (act-order); quantize without it")
        parts = self._four(base, weight) if weight.kind == "table4" else self._eight(base, weight)
        return with_bias(base, parts, bias)

    def _eight(self, base: str, weight: Weight) -> dict[str, Tensor]:
        integer_bits(self.name, base, weight, (8,))
        if weight.zeros is not None or weight.group != weight.shape[1]:
            raise layout_error(
                self.name, base, "has zeros or groups, LLM.int8() has one scale a row; use group_size -1"
            )
        assert weight.scales is not None
        scb = _times(weight.scales[:, 0], 127)
        return {"weight": ordered_codes(weight), "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def _four(self, base: str, weight: Weight) -> dict[str, Tensor]:
        if weight.table is None or not torch.equal(weight.table, to_torch(NF4.table)):
            raise layout_error(self.name, base, "is in another code book than NF4")
        if weight.group not in BLOCKS:
            raise layout_error(
                self.name, base, f"has groups of {weight.group} columns, can have {', '.join(map(str, BLOCKS))}"
            )
        assert weight.scales is not None
        codes = ordered_codes(weight).contiguous().view(torch.uint8).view(-1, 2)
        absmax = _times(weight.scales.flatten(), NF4.unit)
        state = {
            "quant_type": "nf4",
            "blocksize": weight.group,
            "dtype": self.dtype,
            "shape": list(weight.shape),
        }
        parts = {
            "weight": (codes[:, :1] << 4) | codes[:, 1:],
            "weight.quant_map": torch.tensor(NF4_NUMBERS),
        }
        if self.double:
            offset = absmax.mean()
            small, outer = _nested(absmax - offset)
            state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset.item()}
            parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": dynamic_map()}
        text = json.dumps(state).encode()
        return {
            **parts,
            "weight.absmax": small if self.double else absmax,
            "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        }

    def config(self, matrices: Mapping[str, Weight]) -> dict[str, Any]:
        """Return the fields of BitsAndBytesConfig; `ConfigError` where some matrices have 4 bits and others 8."""
        facts = facts_by_matrix(matrices, lambda weight: weight.kind == "table4")
        four = {fact for fact in facts.values() if fact is not None}
        if len(four) != 1:
            reason = "matrices of 4 and of 8 bits are in one file; use one" if four else "no matrix is quantized"
            raise ConfigError(f"layout {self.name}: {reason}")
        is_four = four.pop()
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": is_four,
            "load_in_8bit": not is_four,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": self.dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": self.threshold,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": [base for base, fact in facts.items() if fact is None] or None,
        }


def _times(scales: Tensor, unit: int) -> Tensor:
    """Find the f32 x of which x / unit is `scales`, or nearest to it: a product rounded once need not be that."""
    scales = scales.float()
    best = scales * unit
    error = (best / unit - scales).abs()
    for towards in (-torch.inf, torch.inf):
        other = torch.nextafter(scales * unit, torch.full_like(scales, towards))
        miss = (other / unit - scales).abs()
        best, error = torch.where(miss < error, other, best), torch.minimum(miss, error)
    return best


def dynamic_map() -> Tensor:
    """The 256 numbers of bitsandbytes' dynamic tree quantization (Dettmers 2016), f32, rising, in (-1, 1].

    For each power of ten 10^(i - 6), i = 0..6, the middles of 2^i equal parts of [0.1, 1], with both signs; 0 and 1.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2**i + 1)
        middles = (borders[:-1] + borders[1:]) / 2
        numbers += (10.0 ** (i - 6) * torch.cat((middles, -middles))).tolist()
    return torch.tensor(numbers).sort().values


def _nested(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round values f32 [count] to the nearest numbers of `dynamic_map`: (codes uint8 [count], scales f32 [count /
    256])."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % NESTED)).view(-1, NESTED)
    outer = blocks.abs().amax(1)
    scaled = blocks / torch.where(outer > 0, outer, 1.0)[:, None]
    numbers = dynamic_map()
    codes = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2)
    return codes.flatten()[:count].to(torch.uint8), outer
