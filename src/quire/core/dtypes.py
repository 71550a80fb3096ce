"""Number formats by torch's names, for all that is read and planned without torch (headers, sizes, `quire inspect`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """`name` is torch's (`quire.ops.lazy.torch_dtype` gives its own), `itemsize` in bytes."""

    name: str
    itemsize: int
    is_floating_point: bool = True

    def __str__(self) -> str:
        return self.name


F64 = Dtype("float64", 8)
F32 = Dtype("float32", 4)
F16 = Dtype("float16", 2)
BF16 = Dtype("bfloat16", 2)
F8 = Dtype("float8_e4m3fn", 1)
I64 = Dtype("int64", 8, False)
I32 = Dtype("int32", 4, False)
I16 = Dtype("int16", 2, False)
I8 = Dtype("int8", 1, False)
U8 = Dtype("uint8", 1, False)
BOOL = Dtype("bool", 1, False)
