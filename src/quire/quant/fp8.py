"""Checkpoints of float8 (e4m3) weights: one scale per matrix, per row, or per block (DeepSeek-V3's `weight_scale_inv`).

Codes stay codes. GPUs with float8 arithmetic multiply them with activations rounded to float8; CPUs have none and widen
them to bfloat16 in the kernel, exactly, for bfloat16 activations. In float32, on other GPUs, and in blocks that kernels
do not take they are multiplied by their scales on load, in twice or four times the memory of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.core.dtypes import F8, U8, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host, as_f32
from quire.ops.weights import Weight
from quire.quant.base import Fields, QWeight, float_kind
from quire.quant.packed import SCALES, powers_of_two
from quire.quant.parallel_rows import over_rows

GROUPS = (256, 128, 64, 32)
"""Columns of a group of the CPU's kernels, longest first: a longer scale is repeated for each (1.6 % of the codes)."""


@dataclass(frozen=True)
class Fp8:
    """`scale`: the name of the scales' part. `block`: rows and columns of a block, or None.

    `reciprocal`: a weight is its code over its scale, not times it. `powers`: scales are exponents of two (e8m0), as
    MXFP8 has them for 32 columns of a row each.
    Scales that multiply activations (`optional`) are not used: activations stay in bfloat16 or float32, or are rounded
    to float8 by their own scales.
    """

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    optional: Mapping[str, bool] = field(default_factory=lambda: {"input_scale": True, "activation_scale": True})
    notes: tuple[str, ...] = ()
    reciprocal: bool = False
    powers: bool = False

    @property
    def name(self) -> str:
        """ "fp8", "fp8 128x128" or "mxfp8"."""
        if self.powers:
            return "mxfp8"
        return "fp8 {}x{}".format(*self.block) if self.block else "fp8"

    @property
    def bits_per_number(self) -> float:
        """Bits per number of a matrix that stays in float8: its codes, and a float32 scale per row and group."""
        return 8 + 32 / (self.block or (1, GROUPS[0]))[1]

    @property
    def parts(self) -> Mapping[str, bool]:
        """The matrix and its scales."""
        return {"weight": True, self.scale: not self.powers}

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The matrix's own shape."""
        return shapes["weight"]

    def _scales(self, raw: Mapping[str, Host]) -> tuple[Host, bool]:
        """Scales f32 per block of rows and columns, checked, and whether one is that of the whole matrix."""
        w, scale = raw["weight"], raw[self.scale]
        n, k = w.shape
        if w.dtype != F8:
            raise ModelError(f"weight is {w.dtype}, needs float8_e4m3fn beside {self.scale}")
        rows, columns = self.block or (1, k)
        per_block = -(-n // rows), -(-k // columns)
        whole = self.block is None and scale.size == 1
        allowed = [per_block] if self.block else [per_block, (n,)]
        allowed_types = (U8,) if self.powers else SCALES
        if scale.dtype not in allowed_types or not (whole or scale.shape in allowed):
            raise ModelError(f"{self.scale} is {scale.dtype} {list(scale.shape)}, needs {list(per_block)} numbers")
        if self.powers:
            scale = powers_of_two(scale)
        if not np.isfinite(scale).all():
            raise ModelError(f"{self.scale} holds nan or inf; the file is damaged")
        if ((w.view(np.uint8) & 127) == 127).any():
            raise ModelError("weight holds nan; the file is damaged")
        scale = scale.astype(np.float32)
        if self.reciprocal:
            if not (scale > 0).all():
                raise ModelError(f"{self.scale} divides and holds numbers that are not above 0; the file is damaged")
            scale = 1 / scale
        return scale.reshape(1 if whole else per_block[0], -1), whole

    def keep(self, raw: Mapping[str, Host], activation_bits: int) -> QWeight | None:
        """The matrix as it is stored, scales repeated for each row; None when its blocks are not those of kernels.

        `activation_bits`: 8 for activations in float8, whose kernels take groups of any length; 16 for bfloat16 ones.
        """
        (scale, whole), (n, k) = self._scales(raw), raw["weight"].shape
        rows, columns = self.block or (1, k)
        if k % columns or columns % 32:
            return None
        codes = raw["weight"].copy()
        at = np.zeros(n, np.int64) if whole else np.arange(n) // rows
        scale = scale[at]
        group = columns if activation_bits == 8 else next(g for g in GROUPS if columns % g == 0)
        scale = scale.repeat(columns // group, 1)
        return QWeight(Weight("fp8", codes, scale, group=group, activation_bits=activation_bits))

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """weight * scale as `dtype`, rounded once, from a float32 product."""
        (scale, whole), w = self._scales(raw), raw["weight"]
        n, k = w.shape
        rows, columns = self.block or (1, k)
        out = np.empty((n, k), dtype)

        def work(piece: slice) -> None:
            at = np.zeros(1, np.int64) if whole else np.arange(piece.start, piece.stop) // rows
            factors = scale[at] if columns == k else scale[at].repeat(columns, 1)[:, :k]
            out[piece] = as_f32(w[piece]) * factors

        over_rows(n, k, work)
        return QWeight(Weight(float_kind(dtype), out))


def read(config: Fields, names: Collection[str]) -> Fp8:
    """The scheme from `quantization_config` of quant_method fp8 or fbgemm_fp8; the scales' name from the tensors'.

    DeepSeek's `weight_scale_inv` multiplies; gptqmodel's, of the same name, is what the weights were multiplied by
    (`weight_scale_semantics` "inverse").
    """
    for name in ("fmt", "format", "checkpoint_format"):
        if config.text(name, "e4m3") not in ("e4m3", "float8_e4m3", "float8_e4m3fn", "fp8"):
            raise config.fail(name, "only e4m3 can be read; use the unquantized checkpoint")
    if any(not name.startswith("-:") for name in config.child("dynamic").raw):
        raise config.fail("dynamic", "formats that differ by layer cannot be read, only layers left out (-:)")
    semantics = config.text("weight_scale_semantics", None)
    if semantics not in (None, "inverse"):
        raise config.fail("weight_scale_semantics", f"{semantics!r} is not known; only inverse can be read")
    reciprocal = semantics is not None or config.text("quant_method") == "gptq"
    block = block_size(config, "weight_block_size") if config.has("weight_block_size") else None
    inverse = reciprocal or block is not None or any(n.endswith(".weight_scale_inv") for n in names)
    return Fp8("weight_scale_inv" if inverse else "weight_scale", block, reciprocal=reciprocal)


def block_size(config: Fields, name: str) -> tuple[int, int]:
    """Rows and columns of a block from a field of config.json."""
    block = config.raw[name]
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise config.fail(name, f"is {block!r:.80}, needs two positive integers")
    return block[0], block[1]
