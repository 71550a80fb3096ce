"""Triton's interpreter, where it would compute something else than a device does.

It runs kernels as numpy programs, which is how they are tested without a GPU. Four things of version 3.6 are mended:
f32 becomes bf16 by rounding to the nearest, ties to even, instead of cutting off; bf16 operands of a dot are numbers
instead of their bit patterns; a dot's sums do not depend on its operands' shapes; and bounds of loops may be loaded
numbers under numpy 2.4. A kernel's calls of other functions no longer patch the language anew, which took half of the
time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter as its


def repair() -> None:
    """Make the changes, once; nothing when kernels are compiled."""
    if not knobs.runtime.interpret or getattr(its, "quire_repaired", False):
        return
    its.quire_repaired = True
    _round_to_bf16(its.InterpreterBuilder)
    _round_to_float8(its.InterpreterBuilder)
    _multiply(its.InterpreterBuilder)
    patch_tensor = its._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    its._patch_lang_tensor = patched
    _patch_once()
    _remember_types()


def _patch_once() -> None:
    """Calls of device functions patch what their kernel's start left unpatched, and it is all restored at its end."""
    patch_lang, open_scopes = its._patch_lang, dict[tuple[bool, bool], Any]()

    def patched(fn: Any) -> Any:
        modules = fn.__globals__.values()
        which = (any(m is tl for m in modules), any(m is tl.core for m in modules))
        if which in open_scopes:
            return its._LangPatchScope()
        scope = patch_lang(fn)
        if not open_scopes:
            scope.restore = restore
        open_scopes[which] = scope
        return scope

    def restore() -> None:
        for scope in reversed(open_scopes.values()):
            its._LangPatchScope.restore(scope)
        open_scopes.clear()

    its._patch_lang = patched


def _round_to_bf16(builder: Any) -> None:
    cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return its.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), rounded), tl.bfloat16)
        return cast(self, src, dst_type)

    builder.cast_impl = cast_impl


def _round_to_float8(builder: Any) -> None:
    """Rounding up to the next power of two forgot the exponent."""
    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.float8e4nv:
            rounded = torch.from_numpy(np.array(src.data)).to(torch.float8_e4m3fn)
            return its.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)
        return convert(self, src, dst_type, rounding_mode)

    builder.create_fp_to_fp = create_fp_to_fp


def _multiply(builder: Any) -> None:
    """Dots of floats are summed in f64: numpy's library sums f32 in an order that depends on the operands' shapes on
    some processors (OpenBLAS on a Zen 5), where a device has one order per kernel."""
    multiply = builder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if x.dtype.primitive_bitwidth == 8:
            return its._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not (a.dtype.is_floating() and b.dtype.is_floating()):
            return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)
        with np.errstate(over="ignore", invalid="ignore"):
            product = np.matmul(widened(a), widened(b)).astype(d.data.dtype)
            return its.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def _remember_types() -> None:
    """Shapes and numpy's types are looked up by each operation; making them anew took a third of the time."""
    find, types = its._get_np_dtype, dict[str, Any]()

    def np_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in types:
            types[name] = find(type.scalar)
        return types[name]

    its._get_np_dtype = np_type
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            constants = [tl.constexpr(n) for n in shape]
            shapes[shape] = tl.core.tuple(constants), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    tl.core.tensor.__init__ = __init__
