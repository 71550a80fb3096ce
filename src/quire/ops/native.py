"""The native module seen from Python: op ids of one instruction-set unit, calls and their recordings, and memory.

An op of `quire._native` takes integers, numbers, arrays, descriptors and addresses; its caller checks shapes first.
"""

from __future__ import annotations

import functools
import importlib
import mmap
from types import ModuleType
from typing import Any

import numpy as np

from quire.core.config import ISAS
from quire.core.dtypes import U8, Dtype
from quire.core.errors import ConfigError
from quire.core.machine import cores
from quire.ops.arrays import Host, address
from quire.ops.tuning import Tuning

UNITS = ISAS[1:]
ALIGN = 256
"""What the addresses of arrays that ops work on are multiples of."""
HUGE = 2 << 20


def load_native() -> ModuleType | None:
    """`quire._native`, or None when the package was installed without it."""
    try:
        return importlib.import_module("quire._native")
    except ModuleNotFoundError as error:
        if error.name != "quire._native":
            raise
        return None


@functools.cache
def best_ops() -> dict[str, int]:
    """Op name -> id of the best unit here, for ops equal on every unit; empty when the extension is not built."""
    module = load_native()
    return {} if module is None else module.ops(module.units()[0])


def require_native() -> ModuleType:
    """`quire._native`; raises `ConfigError` with what to do when it was not built."""
    native = load_native()
    if native is None:
        raise ConfigError(
            "the CPU backend needs the native extension quire._native, which was not built: install a C++20 compiler "
            "(g++ 12 or newer) and install quire again, or choose --device reference (slow)",
            param="device",
        )
    return native


class Native:
    """Ops of one unit. `ids` maps op name -> id; `call` runs one, or only records it while a recording is open."""

    def __init__(self, isa: str = "auto", threads: int = 0) -> None:
        self.module = require_native()
        available: list[str] = self.module.units()
        if isa not in ("auto", *UNITS):
            raise ConfigError(f"--isa {isa!r} is not one of auto, {', '.join(UNITS)}", param="isa")
        if isa != "auto" and isa not in available:
            raise ConfigError(f"--isa {isa}: this machine or build has only {', '.join(available)}", param="isa")
        self.isa = available[0] if isa == "auto" else isa
        self.ids: dict[str, int] = self.module.ops(self.isa)
        self.module.set_threads(threads or cores().threads)
        self.threads: int = self.module.threads()
        self.recording: Any = None
        self.held: list[Any] = []
        """What the recording that is open needs to live: it holds addresses only."""
        self.tuning = Tuning()

    def set_tuning(self, tuning: Tuning) -> None:
        """Use these numbers from the next op on, in all of this process."""
        self.module.call(self.ids["set_tuning"], (tuning.ahead, tuning.tile_rows, tuning.row_streams))
        self.tuning = tuning

    def call(self, name: str, *args: Any) -> None:
        """Run op `name`, or record it, and keep its arguments as long as the recording.

        They are integers, numbers, and for pointers arrays, descriptors, addresses or None. `ValueError` when one is
        missing, null or out of range.
        """
        if self.recording is None:
            self.module.call(self.ids[name], args)
        else:
            self.recording.add(self.ids[name], args)
            self.held.append(args)


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


def huge_bytes(size: int, zeroed: bool = False, small: int = 0) -> Host:
    """`size` bytes (uint8) from a huge page on: in huge pages where the system grants them, but for the first `small`.

    Reads through huge pages reach the machine's bandwidth; through 4 KiB pages they stay well below it. Pages appear at
    their first touch, all zero, so that a large cache costs nothing until it is used; `zeroed` matters to small sizes
    only. `ConfigError` when the system does not grant the address space.
    """
    if size < HUGE:
        raw = (np.zeros if zeroed else np.empty)(size + ALIGN, U8)
        skip = -address(raw) % ALIGN
        return raw[skip : skip + size]
    # Not zeros: they write every page before advice can be given (4.3 GB took 12 s, in 4 KiB pages).
    try:
        area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the system does not grant {size:,} bytes of memory ({error.strerror}); use a smaller model, or lower "
            "--kv-cache-memory-bytes or --max-num-seqs"
        ) from None
    raw = np.frombuffer(area, U8)
    skip = -address(raw) % HUGE
    if small and hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE, skip, small)
    if (native := load_native()) is not None:
        native.advise_huge(address(raw) + skip + small, size - small)
    return raw[skip : skip + size]
