"""What rank 0 tells the others. No engine object crosses: only sizes, blocks and the filled arrays of a step."""

from __future__ import annotations

import msgspec

from quire.core.config import EngineConfig, SchedulerConfig
from quire.parallel.experts import ExpertPlan


class Start(msgspec.Struct, frozen=True):
    """The first line of a rank's standard input, as JSON.

    `world`, `groups`, `busy`: descriptors of what it shares with all ranks, with those of its group along each axis,
    and of where ranks say how long they computed.
    """

    config: EngineConfig
    rank: int
    world: int
    groups: dict[str, int]
    busy: int
    crowded: bool
    experts: ExpertPlan


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take `blocks` of keys and values for sequences of `max_model_len` tokens, for steps of `limits`, and warm up."""

    blocks: int
    max_model_len: int
    limits: SchedulerConfig


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a step of the sizes `shape` on `arrays`: the model's, or, `drafts`, one of the model that drafts.

    `given` [tokens, hidden] f32: the target's hidden rows, where that one reads them.
    """

    shape: tuple[int, int, int, int, bool, bool]
    arrays: bytes
    drafts: bool = False
    given: bytes = b""


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Compute an encoder's part: tokens, int32, whose keys and values go to slots, int64."""

    tokens: bytes
    slots: bytes


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


Message = Allocate | Forward | Encode | Zero | Copy | Move | Adapter
