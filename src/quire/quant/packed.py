"""Integer codes packed into int32 words, and group scales of any size, as the weights the kernels take.

Words are little-endian: their bytes in memory are one stream of bits, in which the codes follow each other from the
lowest bit on: two 4-bit codes to a byte with the first in the low half, eight codes of 3 bits to three bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quire.core.errors import ModelError
from quire.ops.lazy import torch
from quire.ops.weights import Weight
from quire.quant.base import QWeight
from quire.quant.rows import over_rows

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {bits: "int4" if bits <= 4 else "int8" for bits in range(2, 9)}
"""Bits of a code in a file -> the kind that holds it: codes of 2 and 3 bits take 4, those of 5 to 7 take 8."""
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Bits of a code -> widths of the planes that gptqmodel cuts it into, the lowest bits first."""
GROUPS = (128, 64, 32, 16)
"""Groups the kernels take, largest first: fewer scales to read."""
EXPONENT_NAN = 255


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unsigned codes uint8 [r, c * 32 / bits] of words int32 [r, c]; what is left of the last word is dropped."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    if bits == 4:
        return torch.stack((data & 15, data >> 4), -1).flatten(-2)
    count = words.shape[1] * 32 // bits
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % bits)).view(len(data), -1, bits)
    codes = torch.empty((*data.shape[:2], 8), dtype=torch.uint8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = data[..., byte] >> shift
        if shift + bits > 8:
            code = code | data[..., byte + 1] << (8 - shift)
        codes[..., place] = code & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count]


def unpack_planes(words: Tensor, bits: int) -> Tensor:
    """As `unpack`, of words in which every 32 codes are `PLANES` behind each other; c is a multiple of `bits`."""
    blocks = words.reshape(-1, bits)
    codes, word, bit = torch.zeros((len(blocks), 32), dtype=torch.uint8), 0, 0
    for width in PLANES[bits]:
        codes |= unpack(blocks[:, word : word + width], width) << bit
        word, bit = word + width, bit + width
    return codes.view(len(words), -1)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes uint8 as int8, 2^(bits - 1) less: of 4 bits 0..15 becomes -8..7."""
    return codes.sub(1 << (bits - 1)).view(torch.int8)


def unpack_rows(words: Tensor, bits: int, take_apart: Callable[[Tensor, int], Tensor] = unpack) -> Tensor:
    """Signed codes int8 [n, k] of words int32 [n, k * bits / 32], by `unpack` or `unpack_planes`."""
    n, width = words.shape
    codes = torch.empty((n, width * 32 // bits), dtype=torch.int8)

    def work(rows: slice) -> None:
        codes[rows] = signed(take_apart(words[rows], bits), bits)

    over_rows(n, codes.shape[1], work)
    return codes


def scale_dtypes() -> tuple[torch.dtype, ...]:
    """Those in which files keep scales."""
    return torch.float16, torch.bfloat16, torch.float32


def expect(raw: Mapping[str, Tensor], part: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """`raw[part]`, which must have this shape and one of these dtypes; otherwise `ModelError`."""
    tensor = raw[part]
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        have = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ModelError(f"{part} is {have}, needs {names} {list(shape)}; config.json belongs to other weights")
    return tensor


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) as f32 of exponents uint8 (e8m0); `ModelError` for the code of NaN."""
    if bool((exponents == EXPONENT_NAN).any()):
        raise ModelError("a scale is nan; the file is damaged")
    return torch.exp2(exponents.float() - 127.0)


def group_count(columns: int, group: int) -> int:
    """Groups of `group` columns in a row (-1: the whole row is one); the last may be short."""
    return 1 if group == -1 else -(-columns // group)


def loaded_bits(bits: int, group: int, zeros: bool) -> float:
    """Bits of a loaded number: its code, in the kind that holds it, and its part of a float16 scale and of a zero."""
    bits = 4 if KINDS[bits] == "int4" else 8
    width = 128 if group == -1 else next((g for g in GROUPS if group % g == 0), group)
    return bits + (16 + 8 * zeros) / width


def grouped(
    bits: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    order: Tensor | None = None,
    activation_bits: int = 8,
) -> QWeight:
    """The weight (codes - zeros) * scales in groups that the kernels take.

    codes [n, k] int8; scales [n, `group_count`] f16, bf16 or f32, kept in f16 where that holds them all, else as f32;
    zeros int8 or None. A scale of more columns than the kernels' groups is repeated: the numbers are the same, the
    activations are rounded more finely. Zeros that are all 0 are dropped: symmetric kernels are faster. `order` [k]
    int64: the group of 'group' columns each that column order[j] is in is that of place j.
    """
    k = codes.shape[1]
    width = k if group == -1 else group
    native = next((g for g in GROUPS if width % g == 0 and k % g == 0), None)
    if native is None:
        raise ModelError(
            f"has {k} columns in groups of {width}, which are not cut by 16, as the kernels need it; "
            "use the unquantized checkpoint and --quantization"
        )
    if not bool(torch.isfinite(scales).all()):
        raise ModelError("a scale is nan or inf; the file is damaged")
    if zeros is not None and not bool(zeros.any()):
        zeros = None
    if scales.dtype != torch.float16:
        half, scales = scales.half(), scales.float()
        scales = half if torch.equal(half.float(), scales) else scales
    if width != native:
        scales = _repeat(scales, width // native, k // native)
        zeros = None if zeros is None else _repeat(zeros, width // native, k // native)
    if order is not None:
        codes, order = codes[:, order].contiguous(), order.int()
    return QWeight(Weight(KINDS[bits], codes, scales, zeros, native, order=order, activation_bits=activation_bits))


def _repeat(values: Tensor, times: int, wanted: int) -> Tensor:
    return values.repeat_interleave(times, 1)[:, :wanted].contiguous()


def order_of(g_idx: Tensor, columns: int, group: int) -> Tensor | None:
    """The order of columns [k] int64 in which groups lie together; None when they do already.

    `g_idx` [k] is the group of each column; with act-order (`desc_act`) columns were quantized in the order of falling
    activation and groups are scattered. Each group must have its number of columns, otherwise `ModelError`.
    """
    width = columns if group == -1 else group
    if torch.equal(g_idx.long(), torch.arange(columns) // width):
        return None
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], torch.arange(columns) // width):
        raise ModelError(f"g_idx does not give each group its {width} columns; the file is damaged")
    return order
