"""What `benchmarks/compile_kernels.py` compiles without a GPU: kernels with the types and sizes of real launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel as one call would compile it; a module of kernels lists its own as `VARIANTS`.

    `signature`: argument -> Triton's name of its type ("*bf16", "i32", "fp32"), constants left out. `constants`:
    argument -> value of every `tl.constexpr` and of every argument that is None. `aligned`: arguments divisible by 16,
    as pointers and most sizes are. `targets`: the only ones it is launched on; empty for all.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())
    targets: tuple[str, ...] = ()
