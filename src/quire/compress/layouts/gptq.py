"""GPTQ files (Frantar et al. 2022) as auto-gptq and gptqmodel write them: `quire.quant.gptq` says how tensors lie.

Format "gptq" stores zeros less one, so that a zero of the lowest code has no form which every program reads: kernels of
vLLM add the one after they cut the code out, and get 2^bits for it. "gptq_v2" stores zeros as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from torch import Tensor

ALLOWED = (2, 3, 4, 8)
HEAD = "lm_head"
"""The output head has a field of its own instead of a rule."""


@dataclass(frozen=True)
class GptqLayout:
    """The layout of auto-gptq and gptqmodel. `form`: checkpoint format, "gptq" (v1) or "gptq_v2"."""

    form: str = "gptq"

    @property
    def name(self) -> str:
        """The name of the checkpoint format."""
        return self.form

    def tensors(self, base: str, weight: Weight, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Return qweight int32 [k * bits / 32, n], qzeros int32 [groups, n * bits / 32], scales [groups, n], g_idx
        int32 [k].

        Scales keep their dtype. `ConfigError` for anything but integers of 2, 3, 4 or 8 bits, for sizes that do not
        fill whole words, and in v1 for a zero of the lowest code.
        """
        if is_unquantized(weight):
            return unquantized_tensors(base, weight, bias)
        bits = integer_bits(self.name, base, weight, ALLOWED)
        n, k = weight.shape
        whole = 32 // math.gcd(bits, 32)
        if n % whole or k % whole:
            raise layout_error(
                self.name, base, f"is {n} x {k}: rows and columns must be multiples of {whole} to fill words"
            )
        assert weight.scales is not None
        scales = weight.scales
        zeros = torch.zeros(scales.shape, dtype=torch.int8) if weight.zeros is None else weight.zeros
        if self.form == "gptq":
            if int(zeros.min()) == -(1 << (bits - 1)):
                raise layout_error(self.name, base, "has a zero of the lowest code, which v1 cannot hold; use gptq_v2")
            zeros = zeros - 1
        index = group_index(weight)
        if index is None:
            index = torch.arange(k, dtype=torch.int32) // weight.group
        parts = {
            "qweight": pack(ordered_codes(weight), bits).t(),
            "qzeros": pack(zeros.t().contiguous(), bits),
            "scales": scales.t(),
            "g_idx": index,
        }
        return with_bias(base, parts, bias)

    def config(self, matrices: Mapping[str, Weight]) -> dict[str, Any]:
        """Return the commonest bits and group; `dynamic` rules of gptqmodel say which matrices differ or stay as they
        are."""
        facts = facts_by_matrix(matrices, _facts)
        bits, group, symmetric = most_common(self.name, {base: fact and fact.rule for base, fact in facts.items()})
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": any(fact is not None and fact.ordered for fact in facts.values()),
            "checkpoint_format": self.form,  # what gptqmodel and vLLM read
            "format": self.form,  # what transformers reads, whose default is v1
            "lm_head": any(base.endswith(HEAD) and fact is not None for base, fact in facts.items()),
        }
        rules: dict[str, Any] = {}
        for base, fact in facts.items():
            if fact is None:
                rules |= {} if base.endswith(HEAD) else {f"-:^{re.escape(base)}$": {}}
            elif fact.rule != (bits, group, symmetric):
                own_bits, own_group, own_symmetric = fact.rule
                rules[f"+:^{re.escape(base)}$"] = {"bits": own_bits, "group_size": own_group, "sym": own_symmetric}
        return config | ({"dynamic": rules} if rules else {})


class _Facts(NamedTuple):
    """Facts of one matrix. `rule`: bits, columns of a group (-1 = a row) and whether there are no zeros.

    `ordered`: groups do not lie together (act-order).
    """

    rule: tuple[int, int, bool]
    ordered: bool


def _facts(weight: Weight) -> _Facts:
    bits = weight.bits or {"int4": 4, "int8": 8}.get(weight.kind, 0)
    return _Facts((bits, group_of(weight), weight.zeros is None), group_index(weight) is not None)
