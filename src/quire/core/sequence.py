"""The scheduler's view of one growing row of tokens."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import NamedTuple, Protocol

from quire.core.request import FinishReason, Miss, Request, Timing, TokenLogprob

SLID_OUT = -1
"""Entry of a block table whose block was freed, because no future row can see it."""
STORED = -2
"""Where a lookup found a block that is not in the cache and that a store has."""


class Status(IntEnum):
    """Where a sequence stands; `sched.queues` moves it.

    PENDING: before its sibling's prompt is computed (n > 1). WAITING: in the queue. WAITING_FOR_GRAMMAR,
    WAITING_FOR_STORE: beside it, until its grammar is ready, or its blocks are recalled. RUNNING: in the batch.
    WAITING_FOR_IMAGE: there, too, and its next rows are of an image that is not encoded yet.
    """

    PENDING = 0
    WAITING = 1
    WAITING_FOR_GRAMMAR = 2
    WAITING_FOR_STORE = 3
    RUNNING = 4
    WAITING_FOR_IMAGE = 5
    FINISHED = 6


class KVBlocks:
    """Where the keys and values of a sequence lie; `cache.tables` writes it.

    `blocks` holds a block table per group of layers, all of one length, or nothing; the first `slid` entries of each
    are SLID_OUT. The first `published` blocks can be found by others under `keys`, the hash chain of its tokens.

    `cached_tokens`: of the prompt, found in the prefix cache; `miss`: where that ended and why, if that is asked for.
    `recalled`: how often its blocks were looked for in a store, at most once before each time that it runs.
    """

    __slots__ = ("blocks", "cached_tokens", "keys", "miss", "published", "recalled", "slid")

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.slid: list[int] = []
        self.keys: list[bytes] = []
        self.published = self.cached_tokens = self.recalled = 0
        self.miss: Miss | None = None


class Snapshot(NamedTuple):
    """A recurrent state after `tokens` tokens, in a slot of its own; it may be published once the first `known` tokens
    are known to be computed. `trails`: it is held back until the sequence ends, or has one after more tokens."""

    tokens: int
    slot: int
    known: int
    trails: bool = False


class StateSlot:
    """Where the recurrent state of a sequence lies; `cache.states` writes it.

    `slot` holds the state after the first `tokens` tokens (-1: there is none, which is zeros after no token); the next
    state is stored to `next` where that is not -1. `snapshots`: states that are to be published. `shared`: tokens of
    its prompt that another sequence had, with no state there. `trail`: the state at the end of its last whole block,
    known to be finite, to be published when it ends. `nearest`: tokens before its last snapshot.
    """

    __slots__ = ("nearest", "next", "shared", "slot", "snapshots", "tokens", "trail")

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.shared = 0
        self.clear()

    def clear(self) -> None:
        """Have no slot."""
        self.slot = self.next = -1
        self.tokens = self.nearest = 0
        self.trail: Snapshot | None = None
        self.snapshots.clear()


class Draft:
    """Tokens guessed to follow those of a sequence, and what became of such; `speculate` writes it.

    `tokens` may branch: node j follows node `parents`[j] < j, or the last token where that is -1; without `parents`
    each follows the one before.

    `enabled`: False for requests that get no tokens, and once a draft's rows gave no numbers. `drafted` tokens were
    guessed so far, `accepted` of them kept; `lookup` and `acceptance` are what a proposer and the cost model of drafts
    keep of it.
    """

    __slots__ = ("acceptance", "accepted", "drafted", "enabled", "lookup", "parents", "tokens")

    def __init__(self, enabled: bool = True) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.enabled = enabled
        self.drafted = self.accepted = 0
        self.lookup: object = None
        self.acceptance = (0.0, 0.0)

    def matching_child(self, node: int, token: int) -> int | None:
        """The node that says `token` after `node` (-1: the last token), so that its row counts; None: no node does."""
        tokens, parents = self.tokens, self.parents
        if not parents:
            follows = node + 1
            return follows if follows < len(tokens) and tokens[follows] == token else None
        for follows in range(node + 1, len(tokens)):
            if parents[follows] == node and tokens[follows] == token:
                return follows
        return None

    def branch(self, node: int) -> list[int]:
        """The drafted nodes from the first to `node`, each following the one before; none for -1."""
        if not self.parents:
            return list(range(node + 1))
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def cut(self, count: int) -> None:
        """Drop the last `count` tokens, or all, or none."""
        if count > 0:
            del self.tokens[max(0, len(self.tokens) - count) :]

    def prune(self, nodes: list[int]) -> None:
        """Keep these nodes alone, in order; what each follows is one of them, or the last token."""
        if self.parents:
            places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
            self.parents = [places[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]


class SequenceTimes:
    """When what happened to a sequence (seconds of `time.monotonic`, 0: not yet), and how often it was preempted."""

    __slots__ = ("first_scheduled", "first_token", "last_token", "preemptions")

    def __init__(self) -> None:
        self.first_scheduled = self.first_token = self.last_token = 0.0
        self.preemptions = 0

    def timing(self, arrival: float) -> Timing:
        """Times as clients are told of them."""
        return Timing(
            arrival=arrival, scheduled=self.first_scheduled, first_token=self.first_token, last_token=self.last_token
        )


class EncoderPart(NamedTuple):
    """Layout of a sequence with an encoder: the first `tokens` of a sequence are the encoder's, and the decoder's
    begin at `lead`, which begins a block; what lies between is never read. Both are 0 otherwise."""

    tokens: int = 0
    lead: int = 0


NO_ENCODER = EncoderPart()


class Guide(Protocol):
    """What a sequence may say next, so that it follows its request's grammar (`quire.text.structured`).

    `seconds` that a token of it takes others who are in the same step, lately; `turn`: the last that it had of those
    who take long.
    """

    seconds: float
    turn: int

    def complete(self, made: int) -> bool:
        """Whether nothing may follow the first `made` tokens of the output but an end."""
        ...

    def anew(self) -> Guide:
        """Make a guide of the same grammar that stands at the beginning."""
        ...


class Sequence:
    """A sequence: one of a request's `n` rows of tokens.

    One rule moves it: every step brings `computed` closer to `target`. Prefill, chunked prefill, prefix hits, decode,
    speculation, preemption and replay are all that rule; there is no phase flag.

    `limit`: tokens that it may have. `order`: its place among all, by the policy.

    `in_flight`: tokens that steps under way will append; `computed` counts what these steps compute, too.
    `steps_in_flight`: how many of them have a part of it.

    One slot for each subject beside: `kv`, `draft`, `times`, `encoder`; `state` where the model has recurrent states;
    `guide` of a request with a grammar, once it is ready (until then the sequence does not enter the queue); `pooled`:
    what is kept of a pooled request's hidden rows.
    """

    __slots__ = (
        "computed",
        "draft",
        "encoder",
        "finish_reason",
        "guide",
        "in_flight",
        "index",
        "kv",
        "limit",
        "order",
        "pooled",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "state",
        "status",
        "steps_in_flight",
        "stop_token",
        "times",
        "tokens",
    )

    def __init__(self, request: Request, index: int = 0, longest: int = sys.maxsize) -> None:
        """`longest`: tokens that the model takes."""
        self.request = request
        self.index = index
        self.order: tuple[float, int, int] = (0.0, 0, index)
        self.tokens: list[int] = list(request.prompt)
        self.encoder = NO_ENCODER
        if request.decoder_start is not None:
            encoded = len(self.tokens)
            start, self.encoder = request.decoder_start, EncoderPart(encoded, request.decoder_start.lead(encoded))
            begins = request.decoder_prompt or (start.token,)
            self.tokens += [begins[0]] * (self.encoder.lead - encoded)
            self.tokens += begins
            longest = min(longest, self.encoder.lead + start.positions) if start.positions else longest
        self.prompt_len = length = len(self.tokens)
        most = request.params.max_tokens
        self.limit = longest if most is None else min(longest, length + most)
        if request.pooling is not None:  # its only output takes no place behind the prompt
            self.limit = length + 1
        self.computed = self.in_flight = self.steps_in_flight = 0
        self.status = Status.PENDING
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.kv, self.draft, self.times = KVBlocks(), Draft(request.pooling is None), SequenceTimes()
        self.state: StateSlot | None = None
        self.guide: Guide | None = None
        self.pooled: object = None

    @property
    def target(self) -> int:
        """The length that `computed` moves toward: tokens that are there, tokens in flight, and the draft's."""
        return len(self.tokens) + self.in_flight + len(self.draft.tokens)

    @property
    def again(self) -> int:
        """Tokens that are computed and run again with the next: those that its recurrent state does not have yet."""
        return 0 if self.state is None else self.computed - self.state.tokens

    @property
    def timing(self) -> Timing:
        """When what happened to it."""
        return self.times.timing(self.request.arrival)

    def prompt_tokens(self, start: int, end: int) -> int:
        """How many tokens from `start` to before `end` are of the request's prompt."""
        return max(0, min(end, self.encoder.tokens or self.prompt_len) - start)

    @property
    def output(self) -> list[int]:
        """The generated tokens, shape [len(tokens) - prompt_len]."""
        return self.tokens[self.prompt_len :]

    def __repr__(self) -> str:
        return f"Sequence({self.request.id}/{self.index} {self.computed}/{self.target} {self.status.name})"
