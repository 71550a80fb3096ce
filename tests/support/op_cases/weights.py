"""Weights of every kind with random numbers, by which layouts are told apart and implementations compared."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from quire.ops.weights import Weight

CODES = {"int4": (-8, 8), "int8": (-128, 128), "table4": (0, 16)}
TABLES = {1: (0, 1, 2, 3, 4, 6, 8, 12, -127, -1, -2, -3, -4, -6, -8, 127),
          2: (*range(-32512, 32513, 4335), 255)}  # fmt: skip
"""Numbers of 4-bit codes that fit into one digit, and that take two."""


def normal(g: Generator, *shape: int) -> Tensor:
    """Standard normal f32."""
    return torch.randn(shape, generator=g)


def random_weight(
    g: Generator, kind: str, n: int, k: int, group: int = 32, zeros: bool = False, bits: int = 8
) -> Weight:
    """A weight of `kind` whose rows have about unit norm per sqrt(k); its activations are of `bits`."""
    if kind == "f32":
        return Weight(kind, normal(g, n, k))
    if kind in ("bf16", "bf16_f32"):
        return Weight(kind, normal(g, n, k).bfloat16())
    if kind == "f16":
        return Weight(kind, normal(g, n, k).half())
    if kind == "fp8":  # every code but the two of nan
        codes8 = (torch.randint(127, (n, k), generator=g) + 128 * torch.randint(2, (n, k), generator=g)).to(torch.uint8)
        scales8 = (0.5 + torch.rand(n, k // group, generator=g)) / 448
        return Weight(kind, codes8.view(torch.float8_e4m3fn), scales8, None, group, activation_bits=16)
    low, high = CODES[kind]
    codes = torch.randint(low, high, (n, k), generator=g, dtype=torch.int8)
    scales = ((0.5 + torch.rand(n, k // group, generator=g)) / high).half()
    zero = torch.randint(low, high, scales.shape, generator=g, dtype=torch.int8) if zeros else None
    table = torch.tensor(TABLES[1], dtype=torch.int16) if kind == "table4" else None
    return Weight(kind, codes, scales, zero, group, table=table, activation_bits=bits)
