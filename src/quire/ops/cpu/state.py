"""What the CPU backend's ops share: the native unit, the arena of their outputs, and the check of their arguments."""

from __future__ import annotations

from quire.core.dtypes import BF16, F16, F32, I32, I64, Dtype
from quire.ops.activations import ACTIVATIONS
from quire.ops.arrays import Host
from quire.ops.cpu.arena import Arena
from quire.ops.native import Native

__all__ = ["ACTIVATION_NUMBERS", "BF16", "F32", "I32", "I64", "TABLES", "Cpu", "check"]

ACTIVATION_NUMBERS = {name: index for index, name in enumerate(ACTIVATIONS)}
"""Numbers of the activations in csrc/units/elementwise.h."""


class Cpu:
    """What the implementations below share: the native unit, the arena of outputs, what a recording keeps alive.

    `bf16_bits` 12: bf16 matrices may be packed in 12 bits, without loss. `sparse`: which matrices lose their zeros, as
    `--sparse` says.
    """

    def __init__(self, native: Native, bf16_bits: int = 16, sparse: str = "auto") -> None:
        self.native = native
        self.bf16_bits, self.sparse = bf16_bits, sparse
        self.call = native.call
        self.arena = Arena(native)


def check(x: Host, what: str, dtype: Dtype, *shape: int) -> Host:
    """`x` itself when it is contiguous and of that dtype and shape (-1: any size); a ValueError names what is not."""
    if x.dtype == dtype and x.flags.c_contiguous and x.ndim == len(shape):
        for have, want in zip(x.shape, shape, strict=True):
            if want not in (-1, have):
                break
        else:
            return x
    raise ValueError(
        f"{what}: need a contiguous {dtype} array of shape {list(shape)}, got {x.dtype} {list(x.shape)}"
        f"{'' if x.flags.c_contiguous else ', not contiguous'}"
    )


TABLES = (F32, BF16, F16)
"""Numbers of the dtypes of tables in csrc/units/elementwise.h."""
