"""What rank 0 tells the others. No engine object crosses: only sizes, blocks and the filled arrays of a step."""

from __future__ import annotations

import msgspec

from quire.core.config import EngineConfig
from quire.parallel.experts import ExpertPlan


class Meeting(msgspec.Struct, frozen=True):
    """Where ranks of several hosts find rank 0: its address, the port it is heard at, and that of the store in which
    groups find each other. `hosts`: of all ranks."""

    hosts: tuple[int, ...]
    address: str
    port: int
    store: int


class Start(msgspec.Struct, frozen=True):
    """The first line of a rank's standard input, as JSON.

    `meeting`: None where all ranks are on one host; `weights`: else a digest of rank 0's files. `world`, `groups`,
    `busy`: descriptors of what it shares with all ranks of its host, with those of its group along each axis, and of
    where ranks say how long they computed.
    """

    config: EngineConfig
    rank: int
    crowded: bool
    experts: ExpertPlan
    meeting: Meeting | None = None
    weights: str = ""
    world: int = -1
    groups: dict[str, int] = {}
    busy: int = -1


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take `blocks` of keys and values for sequences of `max_model_len` tokens, and warm up."""

    blocks: int
    max_model_len: int


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a step of the sizes `shape` on `arrays`."""

    shape: tuple[int, int, int, int, bool]
    arrays: bytes


class Zero(msgspec.Struct, frozen=True, tag=True):
    """Wipe blocks."""

    blocks: tuple[int, ...]


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks, (source, destination)."""

    pairs: tuple[tuple[int, int], ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Move slots, (source, destination)."""

    pairs: tuple[tuple[int, int], ...]


class Adapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in `folder` under `name`, in the place of one of that name; unload it without a folder."""

    name: str
    folder: str


Message = Allocate | Forward | Zero | Copy | Move | Adapter
