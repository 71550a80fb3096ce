"""The native module seen from Python: op ids of one instruction-set unit, calls, and recordings of calls.

An op of `quire._native` takes integers, numbers, arrays and addresses; whoever calls it checks shapes first.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from quire.core.config import ISAS
from quire.core.errors import ConfigError
from quire.core.machine import cores
from quire.ops.tuning import Tuning

UNITS = ISAS[1:]


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
        """Run op `name`, or record it: its arguments are integers, numbers, arrays, and addresses or None for pointers.

        `ValueError` when an argument is missing, null or out of range.
        """
        if self.recording is None:
            self.module.call(self.ids[name], args)
        else:
            self.recording.add(self.ids[name], args)
            self.held.append(args)
