"""Checkpoints that bitsandbytes wrote: NF4 or FP4, their scales plain or quantized again, and LLM.int8().

4 bits (Dettmers et al. 2023): `weight` bytes [n * k / 2, 1], held by numbers of any type, two codes to a byte with the
first in the high half, in blocks of `blocksize` along the rows; `weight.absmax` [blocks], f32, or with double
quantization uint8 codes into `weight.nested_quant_map` [256], scaled per 256 blocks by `weight.nested_absmax` and moved
by `nested_offset`;
`weight.quant_map` [16]; `weight.quant_state.bitsandbytes__nf4` (or fp4), JSON as bytes.

8 bits (Dettmers et al. 2022): `weight` int8 [n, k] and `SCB` [n], the largest magnitude of each row; the value is
code * SCB / 127. The method multiplies columns of outlier activations (beyond `llm_int8_threshold`) in 16 bits; here
every activation has 16 bits, outliers or not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from quire.core.dtypes import BF16, F16, F32, I8, U8, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.quant.base import Fields, QWeight
from quire.quant.codebook import FP4, NF4, CodeBook
from quire.quant.packed import GROUPS, expect, grouped, spread

BOOKS = {"nf4": NF4, "fp4": FP4}
STORAGE = {dtype.name: dtype for dtype in (U8, I8, F16, BF16, F32)}
"""`bnb_4bit_quant_storage`, the type whose numbers hold the codes (FSDP shards floats only)."""


@dataclass(frozen=True)
class FourBits:
    """`nested`: scales are quantized themselves. `storage`: the type of the tensor that holds the codes' bytes."""

    book: CodeBook
    nested: bool
    storage: str = "uint8"
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 4.5
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "bitsandbytes nf4"."""
        return f"bitsandbytes {self.book.name}"

    @property
    def state(self) -> str:
        """The suffix of the tensor that describes the others."""
        return f"weight.quant_state.bitsandbytes__{self.book.name}"

    @property
    def parts(self) -> Mapping[str, bool]:
        """The bytes, their scales and what describes them."""
        nested = {"weight.nested_absmax": True, "weight.nested_quant_map": True} if self.nested else {}
        own = {
            "weight": self.storage.startswith(("float", "bfloat")),
            "weight.absmax": not self.nested,
            "weight.quant_map": True,
            self.state: False,
        }
        return {**own, **nested}

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The count of numbers only: rows and columns are in the description."""
        return (2 * STORAGE[self.storage].itemsize * math.prod(shapes["weight"]),)

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight; numbers of NF4 within 2e-5 of the book's, relative to the largest of a block."""
        state = _state(raw[self.state])
        (n, k), block = state["shape"], state["blocksize"]
        stored = expect(raw, "weight", raw["weight"].shape, STORAGE[self.storage])
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        if 2 * data.size != n * k:
            raise ModelError(f"weight holds {2 * data.size} codes, its description asks for {n} x {k}")
        if k % block or not any(block % g == 0 for g in GROUPS):
            raise ModelError(
                f"has rows of {k} numbers in blocks of {block}, which no kernel reads; use the unquantized checkpoint "
                f"and --quantization {self.book.name}"
            )
        numbers = expect(raw, "weight.quant_map", (16,), F32)
        wanted = self.book.table.astype(np.float32) / self.book.unit
        if not np.allclose(numbers, wanted, rtol=0, atol=2e-5):
            raise ModelError(f"weight.quant_map is not the code book {self.book.name}; the file is damaged")
        low_first = data << 4 | data >> 4
        codes = spread(low_first, 4).view(np.int8).reshape(n, k)
        scales = self._scales(raw, state, n * k // block).reshape(n, k // block)
        group = next(g for g in GROUPS if block % g == 0)
        return self.book.weight(codes, scales.repeat(block // group, 1), group)

    def _scales(self, raw: Mapping[str, Host], state: dict[str, Any], count: int) -> Host:
        if not self.nested:
            return expect(raw, "weight.absmax", (count,), F32)
        size = state["nested_blocksize"]
        codes = expect(raw, "weight.absmax", (count,), U8)
        numbers = expect(raw, "weight.nested_quant_map", (256,), F32)
        outer = expect(raw, "weight.nested_absmax", (-(-count // size),), F32)
        offset = float(state.get("nested_offset", 0.0))
        return numbers[codes] * outer.repeat(size)[:count] + offset


def _state(data: Host) -> dict[str, Any]:
    """The description, its fields checked."""
    try:
        state = msgspec.json.decode(data.astype(np.uint8).tobytes(), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ModelError(f"quant_state is not a JSON object ({error}); the file is damaged") from None
    shape, sizes = state.get("shape"), (state.get("blocksize"), state.get("nested_blocksize", 256))
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(x) is int and x > 0 for x in (*shape, *sizes))
    if not whole or type(state.get("nested_offset", 0.0)) not in (int, float):
        raise ModelError(f"quant_state: needs a shape, a blocksize and an offset, has {state!r:.200}")
    return state


@dataclass(frozen=True)
class EightBits:
    """LLM.int8(): a scale per row."""

    name: str = "bitsandbytes int8"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"weight": False, "SCB": True})
    optional: Mapping[str, bool] = field(default_factory=lambda: {"weight_format": False})
    bits_per_number: float = 8 + 32 / 128
    notes: tuple[str, ...] = ("activations keep 16 bits in every column, which outliers alone do in LLM.int8()",)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The matrix's own shape."""
        return shapes["weight"]

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, without a change to its codes."""
        n, k = raw["weight"].shape
        if "weight_format" in raw and raw["weight_format"].item() != 0:
            raise ModelError("weight_format is not row-major; save the model with a newer bitsandbytes")
        codes = expect(raw, "weight", (n, k), I8)
        scales = expect(raw, "SCB", (n,), F32, F16)
        return grouped(8, codes, (scales.astype(np.float32) / 127.0)[:, None], None, -1, activation_bits=16)


def read(config: Fields, names: Collection[str]) -> FourBits | EightBits:
    """The scheme from `quantization_config`; whether scales are nested from the tensors that are there."""
    if config.flag("load_in_8bit", False):
        return EightBits()
    if not config.flag("load_in_4bit", False):
        raise config.fail("load_in_4bit", "and load_in_8bit are both false; one says how weights are kept")
    kind = config.text("bnb_4bit_quant_type", "fp4")
    if kind not in BOOKS:
        raise config.fail("bnb_4bit_quant_type", f"{kind!r} cannot be read, only {', '.join(BOOKS)}")
    storage = config.text("bnb_4bit_quant_storage", "uint8")
    if storage not in STORAGE:
        raise config.fail("bnb_4bit_quant_storage", f"{storage!r} cannot be read, only {', '.join(STORAGE)}")
    return FourBits(BOOKS[kind], any(name.endswith(".weight.nested_absmax") for name in names), storage)
