"""The native extension (csrc/module.cpp): numbers, addresses and arrays in, results in the caller's memory.

One build serves every CPython from 3.11 on: it is written in the limited API.
"""

from typing import Any

from numpy.typing import NDArray

def units() -> list[str]:
    """Instruction-set units this machine can run, best first."""

def ops(unit: str) -> dict[str, int]:
    """Op name -> id, for the ops of `unit` and those that exist once."""

def kinds() -> list[tuple[str, int, int, str, str, tuple[int, ...], tuple[str, ...], tuple[str, ...], bool, int]]:
    """The rows of csrc/kinds.inc by the number of the kind; `Kind` of quire/ops/kinds.py names the fields."""

def facts() -> dict[str, int]:
    """The numbers of csrc/facts.h by their names; quire/ops/facts.py says what they are."""

def expands() -> bool:
    """Whether bytes are expanded by a mask in one instruction (AVX-512 VBMI2)."""

def call(id: int, args: tuple[int | float | NDArray[Any] | None, ...]) -> None:
    """Run one op; raises ValueError on bad arguments."""

def threads() -> int:
    """Threads that run an op."""

def set_threads(threads: int, pin: bool = False) -> None:
    """Set the number of threads (0: all cores of the affinity mask), optionally pinned to cores."""

def advise_huge(address: int, bytes: int) -> None:
    """Ask for huge pages in a range of memory."""

def tiles_read() -> int:
    """Tiles of 64 keys and values of a head that attention has read since the start."""

class Program:
    """A recorded sequence of op calls."""

    def __init__(self) -> None: ...
    def add(self, id: int, args: tuple[int | float | NDArray[Any] | None, ...]) -> None:
        """Append a call; its arguments are checked now."""

    def run(self) -> None:
        """Run all calls in order with the interpreter lock released."""

    def __len__(self) -> int: ...
