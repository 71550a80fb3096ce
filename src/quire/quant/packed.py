"""Integer codes packed into int32 words, and group scales of any size, as the weights the kernels take.

Words are little-endian: their bytes in memory are one stream of bits, in which the codes follow each other from the
lowest bit on: two 4-bit codes to a byte with the first in the low half, eight codes of 3 bits to three bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.ops.weights import Weight
from quire.quant.base import QWeight
from quire.quant.parallel_rows import over_rows

KINDS = {bits: "int4" if bits <= 4 else "int8" for bits in range(2, 9)}
"""Bits of a code in a file -> the kind that holds it: codes of 2 and 3 bits take 4, those of 5 to 7 take 8."""
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Bits of a code -> widths of the planes that gptqmodel cuts it into, the lowest bits first."""
GROUPS = (128, 64, 32, 16)
"""Groups the kernels take, largest first: fewer scales to read."""
SCALES = (F16, BF16, F32)
"""Dtypes in which files keep scales."""
EXPONENT_NAN = 255


def unpack(words: Host, bits: int) -> Host:
    """Unsigned codes uint8 [r, c * 32 / bits] of words int32 [r, c]; what is left of the last word is dropped."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        return spread(data, bits)
    count = words.shape[1] * 32 // bits
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % bits))).reshape(len(data), -1, bits)
    codes = np.empty((*data.shape[:2], 8), np.uint8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = data[..., byte] >> shift
        if shift + bits > 8:
            code = code | data[..., byte + 1] << (8 - shift)
        codes[..., place] = code & ((1 << bits) - 1)
    return codes.reshape(len(words), -1)[:, :count]


def spread(data: Host, bits: int) -> Host:
    """Unsigned codes uint8 [r, c * 8 / bits] of bytes uint8 [r, c] that hold several of 1, 2 or 4 bits each."""
    wide = data.astype(f"<u{8 // bits}")  # a byte for each code, to which its bits are shifted
    codes = wide.copy()
    for place in range(1, 8 // bits):
        codes |= wide << (8 - bits) * place
    codes &= int.from_bytes(bytes([(1 << bits) - 1]) * (8 // bits))
    return codes.view(np.uint8)


def unpack_planes(words: Host, bits: int) -> Host:
    """Work as `unpack`, of words in which every 32 codes are `PLANES` behind each other; c is a multiple of `bits`."""
    blocks = words.reshape(-1, bits)
    codes, word, bit = np.zeros((len(blocks), 32), np.uint8), 0, 0
    for width in PLANES[bits]:
        codes |= unpack(blocks[:, word : word + width], width) << bit
        word, bit = word + width, bit + width
    return codes.reshape(len(words), -1)


def signed(codes: Host, bits: int) -> Host:
    """Unsigned codes uint8 as int8, 2^(bits - 1) less: of 4 bits 0..15 becomes -8..7."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def unpack_rows(words: Host, bits: int, take_apart: Callable[[Host, int], Host] = unpack) -> Host:
    """Signed codes int8 [n, k] of words int32 [n, k * bits / 32], by `unpack` or `unpack_planes`."""
    n, width = words.shape
    codes = np.empty((n, width * 32 // bits), np.int8)

    def work(rows: slice) -> None:
        codes[rows] = signed(take_apart(words[rows], bits), bits)

    over_rows(n, codes.shape[1], work)
    return codes


def expect(raw: Mapping[str, Host], part: str, shape: tuple[int, ...], *dtypes: Dtype) -> Host:
    """`raw[part]`, which must have this shape and one of these dtypes; otherwise `ModelError`."""
    array = raw[part]
    if array.shape != shape or array.dtype not in dtypes:
        names = " or ".join(d.name for d in dtypes)
        have = f"{array.dtype} {list(array.shape)}"
        raise ModelError(f"{part} is {have}, needs {names} {list(shape)}; config.json belongs to other weights")
    return array


def powers_of_two(exponents: Host) -> Host:
    """2^(e - 127) as f32 of exponents uint8 (e8m0); `ModelError` for the code of NaN."""
    if (exponents == EXPONENT_NAN).any():
        raise ModelError("a scale is nan; the file is damaged")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


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
    codes: Host,
    scales: Host,
    zeros: Host | None,
    group: int,
    order: Host | None = None,
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
    if not np.isfinite(scales).all():
        raise ModelError("a scale is nan or inf; the file is damaged")
    if zeros is not None and not zeros.any():
        zeros = None
    scales = fewest_bytes(scales)
    if width != native:
        scales = _repeat(scales, width // native, k // native)
        zeros = None if zeros is None else _repeat(zeros, width // native, k // native)
    if order is not None:
        codes, order = np.take(codes, order, 1), order.astype(np.int32)
    return QWeight(Weight(KINDS[bits], codes, scales, zeros, native, order=order, activation_bits=activation_bits))


def _repeat(values: Host, times: int, wanted: int) -> Host:
    return np.ascontiguousarray(values.repeat(times, 1)[:, :wanted])


def fewest_bytes(scales: Host) -> Host:
    """Scales as f16 when that holds every one of them exactly, else as f32."""
    if scales.dtype == F16:
        return scales
    with np.errstate(over="ignore"):
        half, scales = scales.astype(np.float16), scales.astype(np.float32)
    return half if np.array_equal(half.astype(np.float32), scales) else scales


def order_of(g_idx: Host, columns: int, group: int) -> Host | None:
    """The order of columns [k] int64 in which groups lie together; None when they do already.

    `g_idx` [k] is the group of each column; with act-order (`desc_act`) columns were quantized in the order of falling
    activation and groups are scattered. Each group must have its number of columns, otherwise `ModelError`.
    """
    width = columns if group == -1 else group
    if np.array_equal(g_idx, np.arange(columns) // width):
        return None
    order = g_idx.argsort(stable=True)
    if not np.array_equal(g_idx[order], np.arange(columns) // width):
        raise ModelError(f"g_idx does not give each group its {width} columns; the file is damaged")
    return order
