"""What rank 0 tells the others. No engine object crosses: only sizes, blocks and the filled arrays of a step."""

from __future__ import annotations

import msgspec

from quire.core.config import EngineConfig, SchedulerConfig
from quire.parallel.experts import ExpertPlan


class Rendezvous(msgspec.Struct, frozen=True):
    """Where ranks of several hosts find rank 0: its address, the port it is heard at, and that of the store in which
    groups find each other. `hosts`: of all ranks."""

    hosts: tuple[int, ...]
    address: str
    port: int
    store: int


class Start(msgspec.Struct, frozen=True):
    """The first line of a rank's standard input, as JSON.

    `meet`: the file in which ranks on GPUs find each other. `meeting`: None where all ranks are on one host; `weights`:
    else a digest of rank 0's files. `world`, `groups`, `busy`: descriptors of what it shares with all ranks of its
    host, with those of its group along each axis, and of where ranks say how long they computed. `tied`: the thread
    that starts it lives as long as the engine.
    """

    config: EngineConfig
    rank: int
    crowded: bool
    experts: ExpertPlan
    meeting: Rendezvous | None = None
    meet: str = ""
    weights: str = ""
    world: int = -1
    groups: dict[str, int] = {}
    busy: int = -1
    tied: bool = False


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take `blocks` of keys and values for sequences of `max_model_len` tokens, and `state_slots` for recurrent states,
    for steps of `limits`, and warm up.

    `windows` and `layers` are those of rank 0's groups. Where a store keeps blocks, first send how many bytes one has,
    and a slot of states, int64 [2].
    """

    blocks: int
    max_model_len: int
    limits: SchedulerConfig
    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    state_slots: int = 0


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Run the largest step of `limits` with the others, for sequences of `max_model_len` tokens, and send how many
    bytes of a GPU are left for keys and values, int64 [1]."""

    max_model_len: int
    limits: SchedulerConfig


class GivenRows(msgspec.Struct, frozen=True):
    """`EmbeddedRows` of a step: rows int64, features f32, positions int64 [3, n] or none.

    Where rows see each other: their places in the prompt and the ends of their runs, int64. `ahead`: positions are of
    the rows `turns` int64.
    """

    rows: bytes
    features: bytes
    positions: bytes
    places: bytes = b""
    ends: bytes = b""
    turns: bytes = b""
    ahead: bool = False


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a step of the sizes `shape` on `arrays`: the model's, or, `drafts`, one of the model that drafts.

    `given` [tokens, hidden] f32: the target's hidden rows, where that one reads them. `seen`: rows of images.
    """

    shape: tuple[int, int, int, int, bool, bool]
    arrays: bytes
    drafts: bool = False
    given: bytes = b""
    seen: GivenRows | None = None


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Compute an encoder's part: tokens, int32, whose keys and values go to slots, int64; of the model that `drafts`,
    or of the target."""

    tokens: bytes
    slots: bytes
    drafts: bool = False


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Do what `BlockWork` says: what `saves` hold is sent to rank 0, and `fills` come from there, each a block or a
    slot of a state."""

    moves: tuple[tuple[int, int, int], ...]
    saves: tuple[tuple[int, bool], ...]
    wipes: tuple[int, ...]
    fills: tuple[tuple[int, bool], ...]
    copies: tuple[tuple[int, int], ...]


class Adapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in `folder` under `name`, in the place of one of that name (`replaces`); unload it without a
    folder."""

    name: str
    folder: str
    replaces: bool


Message = Allocate | Profile | Forward | Encode | MoveBlocks | Adapter
