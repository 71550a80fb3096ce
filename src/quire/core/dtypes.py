"""Number formats of arrays: numpy's own, and those of ml_dtypes for what numpy has not (bfloat16, float8).

Their `name`s are torch's too: `quire.ops.lazy.torch_dtype` gives its own.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Dtype = np.dtype[Any]

F64: Dtype = np.dtype(np.float64)
F32: Dtype = np.dtype(np.float32)
F16: Dtype = np.dtype(np.float16)
BF16: Dtype = np.dtype(ml_dtypes.bfloat16)
F8: Dtype = np.dtype(ml_dtypes.float8_e4m3fn)
I64: Dtype = np.dtype(np.int64)
I32: Dtype = np.dtype(np.int32)
I16: Dtype = np.dtype(np.int16)
I8: Dtype = np.dtype(np.int8)
U8: Dtype = np.dtype(np.uint8)
BOOL: Dtype = np.dtype(np.bool_)


def named(name: str) -> Dtype:
    """The dtype of that name: "float32", "bfloat16"."""
    found: Dtype = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    return found


def is_float(dtype: Dtype) -> bool:
    """Whether `dtype` is of floating-point numbers; those of ml_dtypes are none to numpy."""
    return dtype.kind == "f" or dtype in (BF16, F8)
