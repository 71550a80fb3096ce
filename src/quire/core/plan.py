"""What one engine step does, decided without touching a tensor, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.core.errors import QuireError
from quire.core.images import PromptImage
from quire.core.request import TokenLogprob
from quire.core.sequence import Sequence

STORES = 2
"""States of a sequence that a step can store."""


class StateStep(NamedTuple):
    """What a step does with the recurrent state of a sequence: it reads that of the slot `source` (-1: zeros), and
    after the first `rows` of its rows stores the state to `slot`, for each (rows, slot) of `stores`, ascending, of
    which there are `STORES` at most. `again`: tokens that are run again, because the state stands before them."""

    source: int = -1
    stores: tuple[tuple[int, int], ...] = ()
    again: int = 0


NO_STATE = StateStep()
"""The model has no recurrent states."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Advance `seq` by `count` tokens from position `start`; the last `logits` of these rows may want logits.

    `state`: what becomes of the sequence's recurrent state, and how many tokens before `start` are run again.
    """

    seq: Sequence
    start: int
    count: int
    logits: int
    state: StateStep = NO_STATE

    @property
    def again(self) -> int:
        """Tokens before `start` that are run again."""
        return self.state.again

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.state.again + self.count


class Save(NamedTuple):
    """A block whose content, the published keys and values of `tokens` under `key`, is to be copied to a store; or a
    slot with the recurrent `state` behind these tokens."""

    block: int
    key: bytes
    tokens: tuple[int, ...]
    state: bool = False


class Fill(NamedTuple):
    """A block, or a slot of a recurrent `state`, and the bytes of it that came back from a store."""

    block: int
    data: Any
    state: bool = False


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What is done with blocks of the cache beside computing rows, in the order of the fields.

    `moves`: slots (source, destination, table), of tokens that were kept of drafts that branched; `saves` are copied to
    a store; `wipes` are zeroed; `fills` come back from a store; `copies`: blocks (source, destination) of
    copy-on-write.
    """

    moves: tuple[tuple[int, int, int], ...] = ()
    saves: tuple[Save, ...] = ()
    wipes: tuple[int, ...] = ()
    fills: tuple[Fill, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.moves or self.saves or self.wipes or self.fills or self.copies)


NO_WORK = BlockWork()
"""Nothing is to be done with blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All chunks of a step, before whose rows `blocks` is done.

    Of images, the features under the keys `drops` are forgotten and those of `encodes` are made before the rows.

    Steps run in the order of their plans. So what one writes or frees, a later one may use, whichever is committed.
    """

    chunks: tuple[Chunk, ...] = ()
    blocks: BlockWork = NO_WORK
    preempted: tuple[Sequence, ...] = ()
    encodes: tuple[PromptImage, ...] = ()
    drops: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(c.rows for c in self.chunks)


@dataclass(slots=True)
class ChunkResult:
    """What the runner found for one chunk: new tokens, and log-probabilities of them or of the prompt's tokens.

    `path`: the nodes of the draft that all but the last of the tokens are, in order.

    `finite`: there were logits, and none was inf or NaN; so are then the keys and values they came from.
    `retry_without_draft`: a row of a draft gave no numbers. It may be the draft's fault, so the chunk counts for
    nothing and is done without one. `pooled`: the vector of a pooled request whose prompt is done, f32.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    path: list[int] = field(default_factory=list)
    error: QuireError | None = None
    finite: bool = False
    retry_without_draft: bool = False
    pooled: bytes = b""


class LogitRow(NamedTuple):
    """One row of logits: it predicts the token at index `position` of `seq.tokens`.

    With a `target` (the prompt token known to stand there) the row is only scored, for `prompt_logprobs`. A row of the
    draft's `node` predicts what follows it and the drafted tokens before.
    """

    seq: Sequence
    position: int
    target: int | None = None
    node: int = -1
