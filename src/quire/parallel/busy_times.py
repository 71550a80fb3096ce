"""How long each rank has computed, in memory that all of them see."""

from __future__ import annotations

import mmap

import numpy as np

NBYTES = 8 * 64


class BusyTimes:
    """`seconds` [world]: time that ranks spent in steps and not in waiting for each other; each writes its own."""

    def __init__(self, file: int, world: int) -> None:
        """`file`: a descriptor of `NBYTES` zeros."""
        self.seconds = np.frombuffer(mmap.mmap(file, NBYTES), np.float64)[:world]
