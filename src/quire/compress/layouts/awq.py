"""AWQ files (Lin et al. 2023) as AutoAWQ writes them, version "gemm": `quire.quant.awq` says how tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.compress.layouts.base import (
    facts_by_matrix,
    group_index,
    group_of,
    integer_bits,
    is_unquantized,
    layout_error,
    most_common,
    ordered_codes,
    pack,
    unquantized_tensors,
    with_bias,
)
from quire.ops.lazy import torch
from quire.ops.weights import Weight
from quire.quant.awq import ORDER

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AwqLayout:
    """The layout of AutoAWQ. A file has one group size: its config has no place for others."""

    name: str = "awq"

    def tensors(self, base: str, weight: Weight, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Return qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales [groups, n] in their dtype.

        `ConfigError` for anything but integers of 4 bits, for act-order and for rows that are not a multiple of 8.
        """
        if is_unquantized(weight):
            return unquantized_tensors(base, weight, bias)
        integer_bits(self.name, base, weight, (4,))
        n = weight.shape[0]
        if group_index(weight) is not None:
            raise layout_error(self.name, base, "has groups in an order of its own (act-order); quantize without it")
        if n % 8:
            raise layout_error(self.name, base, f"has {n} rows, needs a multiple of 8")
        scales, codes = weight.scales, ordered_codes(weight)
        assert scales is not None
        zeros = torch.zeros(scales.shape, dtype=torch.int8) if weight.zeros is None else weight.zeros
        return with_bias(base, {"qweight": _words(codes), "qzeros": _words(zeros), "scales": scales.t()}, bias)

    def config(self, matrices: Mapping[str, Weight]) -> dict[str, Any]:
        """Return bits, group and the names of what is not quantized; `ConfigError` where groups differ."""
        groups = facts_by_matrix(matrices, group_of)
        group = most_common(self.name, groups)
        for base, own in groups.items():
            if own not in (None, group):
                raise layout_error(
                    self.name, base, f"has groups of {own} columns, others of {group}; a file has one size"
                )
        left = [base for base, own in groups.items() if own is None]
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left or None,
        }


def _words(codes: Tensor) -> Tensor:
    """Pack signed codes int8 [r, c] as int32 [c, r / 8], rows interleaved within a word."""
    turned = codes.t().reshape(codes.shape[1], -1, 8)[..., list(ORDER)]
    return pack(turned.flatten(1), 4)
