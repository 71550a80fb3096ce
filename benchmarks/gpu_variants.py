"""What the launchers of quire.ops.triton would compile for a device that is not here: their launches, written down.

Every launch of `gpu_launches.py` is made on CPU tensors with a `Gpu` of the chip in question, so that the sizes, the
constants and the types are those of serving; the kernels do not run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from quire.ops.triton.gpu import Chip, Gpu
from quire.ops.triton.runtime import Immediate

CHIPS = {
    "sm_90": Chip("NVIDIA H200", 132, 227, True, True),
    "sm_80": Chip("NVIDIA A100", 108, 163, False, True),
    "gfx942": Chip("AMD Instinct MI300X", 304, 64, False, False),
}
"""Target of the compiler -> a device of it."""
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch compiles it.

    `signature`: argument -> Triton's name of its type ("*bf16", "i32", "fp32"), constants left out. `constants`:
    argument -> value of every `tl.constexpr`, and of every argument that is None or a 1 that is specialized on.
    `aligned`: arguments divisible by 16, as pointers and most sizes are.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...]

    @property
    def key(self) -> str:
        """Digest of everything but the kernel's own source and the name."""
        facts = [self.kernel.__name__, sorted(self.signature.items()), self.num_warps, self.num_stages, self.aligned,
                 sorted((name, str(value)) for name, value in self.constants.items())]  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]


def stand_in(target: str) -> Gpu:
    """A device of a target, on which nothing runs."""
    return Gpu(torch.device("cpu"), CHIPS[target], False, Immediate())


def variants(target: str, launches: Callable[[Gpu], Iterator[tuple[str, Callable[[], object]]]]) -> list[Variant]:
    """What `launches` compile for a target, each once, under the name of the first launch that needs it."""
    gpu = stand_in(target)
    found: dict[str, Variant] = {}
    names: set[str] = set()
    for label, launch in launches(gpu):
        for made in written_down(label, launch):
            if made.key not in found:
                if made.name in names:
                    raise ValueError(f"two launches named {made.name!r} compile differently: give each its label")
                names.add(made.name)
                found[made.key] = made
    return list(found.values())


def written_down(label: str, launch: Callable[[], object]) -> list[Variant]:
    """The launches that a call makes."""
    made: list[Variant] = []
    with _no_launches(lambda kernel, args, named: made.append(_variant(label, kernel, args, named))):
        launch()
    return made


@contextmanager
def _no_launches(note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Kernels are noted instead of launched, whether they would be compiled or interpreted."""
    kept = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **named: note(kernel, args, named)
    try:
        yield
    finally:
        KernelInterface.__getitem__ = kept


def _variant(label: str, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    """As Triton specializes: on None, on 1, on divisibility by 16, except where a kernel forbids it."""
    named = dict(named)
    warps, stages = named.pop("num_warps", 4), named.pop("num_stages", 3)
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    plain = getattr(kernel, "kwargs", {}).get("do_not_specialize") or getattr(kernel, "do_not_specialize", None) or ()
    signature, constants, aligned = dict[str, str](), dict[str, Any](), []
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        value = values[name]
        free = type(value) is int and name not in plain
        if "constexpr" in str(parameter.annotation) or value is None or (free and value == 1):
            constants[name] = getattr(value, "value", value)
            continue
        signature[name] = TYPES[value.dtype] if isinstance(value, Tensor) else _scalar(value)
        if isinstance(value, Tensor) or (free and value % 16 == 0):
            aligned.append(name)
    name = f"{kernel.__name__.removesuffix('_kernel')}: {label}"
    return Variant(name, kernel, signature, constants, warps, stages, tuple(aligned))


def _scalar(value: float) -> str:
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
