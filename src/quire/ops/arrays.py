"""The few operations on host arrays that the loader needs in one spelling for numpy's and torch's.

Weights are read as numpy arrays. The workbench puts torch tensors in their place, so that gradients flow through the
loader to the numbers on disk. Both have `shape`, `nbytes`, `itemsize`, `reshape`, `T`, and are indexed by slices and by
numpy's index arrays; what they spell differently is here. torch is not imported: who gives a tensor has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F8, F32, Dtype, named

if TYPE_CHECKING:
    from torch import Tensor

Host = NDArray[Any]
"""An array in the memory of this process."""
Array = Any
"""Numpy's array or torch's tensor: whoever reads it knows which, and type checkers are not told."""
if TYPE_CHECKING:
    AnyArray = Host | Tensor
else:
    AnyArray = Any
Fetched = Callable[[], list[Host]]
"""Waits for copies to the host, and returns them."""
A = TypeVar("A", bound="AnyArray")
_first_byte: Callable[[Any], c_char] = c_char.from_buffer
_F8_NUMBERS = np.arange(256, dtype=np.uint8).view(F8).astype(F32)


def is_tensor(x: object) -> bool:
    """Whether `x` is torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def concat(parts: Sequence[A], axis: int = 0) -> A:
    """`parts` one behind the other along `axis`."""
    if is_tensor(parts[0]):
        return cast(A, sys.modules["torch"].cat(list(parts), axis))
    return cast(A, np.concatenate(cast("Sequence[Host]", parts), axis))


def stack(parts: Sequence[A]) -> A:
    """`parts` of one shape as the entries of a new first axis."""
    if is_tensor(parts[0]):
        return cast(A, sys.modules["torch"].stack(list(parts)))
    return cast(A, np.stack(cast("Sequence[Host]", parts)))


def zeros_of(x: A, *shape: int) -> A:
    """Zeros of `shape`, of the kind and dtype of `x`."""
    if is_tensor(x):
        return cast(A, cast("Any", x).new_zeros(shape))
    return cast(A, np.zeros(shape, cast("Host", x).dtype))


def unit_rows(x: A) -> A:
    """The rows of x [n, k] f32, each divided by its length, or by 1e-12 where that is more."""
    if is_tensor(x):
        return cast(A, sys.modules["torch"].nn.functional.normalize(x))
    rows = cast("Host", x)
    return cast(A, rows / np.maximum(row_norms(rows), np.float32(1e-12))[:, None])


def row_norms(x: Host) -> Host:
    """Lengths [n] f32 of the rows of x [n, k] f32, summed in float64."""
    found: Host = np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64)).astype(np.float32)
    return found


def cast_to(x: A, dtype: Dtype, copy: bool = False) -> A:
    """`x` in `dtype`, rounded to nearest; a copy where `copy` says so or the dtype differs."""
    if is_tensor(x):
        return cast(A, cast("Any", x).to(getattr(sys.modules["torch"], dtype.name), copy=copy))
    return cast(A, cast("Host", x).astype(dtype, copy=copy))


def as_f32(x: A) -> A:
    """`x` in float32, itself where it is."""
    if dtype_of(x) is F8 and not is_tensor(x):  # three times faster than the cast of ml_dtypes
        return cast(A, _F8_NUMBERS[cast("Host", x).view(np.uint8)])
    return cast_to(x, F32)


def zeros_like(x: A, dtype: Dtype) -> A:
    """Zeros in the shape of `x`."""
    if is_tensor(x):
        torch = sys.modules["torch"]
        return cast(A, torch.zeros_like(x, dtype=getattr(torch, dtype.name)))
    return cast(A, np.zeros(x.shape, dtype))


def contiguous(x: A) -> A:
    """`x` in C order, itself where it lies so."""
    if is_tensor(x):
        return cast(A, cast("Any", x).contiguous())
    return cast(A, np.ascontiguousarray(cast("Host", x)))


def exponential(x: A) -> A:
    """e to the power of each number of `x`."""
    if is_tensor(x):
        return cast(A, cast("Any", x).exp())
    return cast(A, np.exp(cast("Host", x)))


def numbers(x: AnyArray) -> int:
    """How many numbers `x` has."""
    return int(np.prod(x.shape, dtype=np.int64))


def equal(a: AnyArray, b: AnyArray) -> bool:
    """Whether `a` and `b` have one shape and the same numbers."""
    if is_tensor(a):
        return bool(sys.modules["torch"].equal(a, b))
    return bool(np.array_equal(cast("Host", a), cast("Host", b)))


def dtype_of(x: AnyArray) -> Dtype:
    """The dtype of `x` as numpy (or ml_dtypes) has it."""
    if not is_tensor(x):
        return cast("Host", x).dtype
    name = str(x.dtype).removeprefix("torch.")
    return named(name)


def to_torch(x: AnyArray) -> Tensor:
    """The memory of `x` as a torch tensor, which must be writable or is copied; a tensor as it is. Imports torch."""
    if is_tensor(x):
        return cast("Tensor", x)
    import torch

    array = cast("Host", x)
    array = array if array.flags.writeable else array.copy()
    name = array.dtype.name
    if array.dtype.kind != "V":
        return torch.from_numpy(array)
    width = {1: np.uint8, 2: np.int16}[array.itemsize]
    return torch.from_numpy(array.view(width)).view(getattr(torch, name))


def to_numpy(x: AnyArray) -> Host:
    """The memory of `x`, a tensor on the host, as a numpy array."""
    if not is_tensor(x):
        return cast("Host", x)
    tensor: Any = x
    tensor = tensor.detach()
    dtype = dtype_of(tensor)
    if dtype.kind != "V":
        return cast("Host", tensor.numpy())
    torch = sys.modules["torch"]
    return cast("Host", tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy().view(dtype))


def view_as(x: A, dtype: Dtype) -> A:
    """The memory of `x`, whose last axis lies without gaps, as numbers of `dtype`."""
    if is_tensor(x):
        return cast(A, cast("Any", x).view(getattr(sys.modules["torch"], dtype.name)))
    return cast(A, cast("Host", x).view(dtype))


def byte_strides(x: AnyArray) -> tuple[int, ...]:
    """Bytes from one index to the next along each axis."""
    if is_tensor(x):
        return tuple(step * x.itemsize for step in cast("Tensor", x).stride())
    return cast("Host", x).strides


def address(x: AnyArray) -> int:
    """Where the first number of `x` lies, on whichever device."""
    if not isinstance(x, np.ndarray):
        return int(cast("Any", x).data_ptr())
    try:  # a quarter of the time of numpy's own way, which builds a dictionary
        return addressof(_first_byte(x))
    except (TypeError, ValueError):  # no array of one piece that may be written, or of a dtype that buffers lack
        return int(x.__array_interface__["data"][0])


def is_array(part: object) -> bool:
    """Whether `part` is an array of numbers, here or on a device."""
    return isinstance(part, np.ndarray) or is_tensor(part)
