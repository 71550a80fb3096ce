"""What ranks are to each other once they have met, and how those of this host are started."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from quire.parallel.comm import Comm
from quire.parallel.digest import DigestReceiver, DigestSender
from quire.parallel.launch import LOST, Launched, Process
from quire.parallel.rank_place import RankPlace, SharedFiles
from quire.run.messages import Start

RANK = "quire.engine.processes.rank"
"""What the other processes run."""


class CommandSender(DigestReceiver, Protocol):
    """Rank 0's way to all others."""

    def tell(self, message: bytes) -> None:
        """Say something to all of them."""

    def leave(self) -> None:
        """Nobody waits any more."""


class CommandReceiver(DigestSender, Protocol):
    """Another rank's way to hear rank 0."""

    def hear(self, milliseconds: int) -> bytes | None:
        """Wait for what rank 0 says next, or None when it says nothing for so long."""


@dataclass
class RankConnections:
    """Rank 0's side. `others`: processes, or what stands for those of a host; `replying`: what only hears replies of
    the last of several stages; `busy`: seconds that each rank of this host computed."""

    world: CommandSender
    place: RankPlace
    others: list[Launched]
    replying: Comm | None
    busy: NDArray[np.float64]


def start_all(starts: Sequence[Start], memory: SharedFiles) -> list[Launched]:
    """Processes of this host, which share `memory`."""
    made: list[Launched] = []
    for start in starts:
        groups = memory.of(start.rank)
        tied = threading.current_thread() is threading.main_thread()
        start = replace(start, world=memory.world, groups=groups, busy=memory.busy, tied=tied)
        files = memory.world, memory.busy, *groups.values()
        made.append(Process(RANK, msgspec.json.encode(start), files=files))
    return made


def host_is_gone(why: str) -> None:
    """End this process at once, so that nobody waits in vain: whoever started it knows that it is nobody's fault."""
    print(f"quire: {why}", file=sys.stderr, flush=True)
    os._exit(LOST)
