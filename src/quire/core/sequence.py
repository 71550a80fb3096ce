"""The scheduler's view of one growing row of tokens."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from quire.core.pictures import Picture
from quire.core.request import FinishReason, Miss, Request, TokenLogprob

SLID_OUT = -1
"""Entry of a block table whose block was freed, because no future row can see it."""
STORED = -2
"""Where a lookup found a block that is not in the cache and that a store has."""


class Status(IntEnum):
    """Where a sequence stands; `sched.waiting_room` moves it.

    PENDING: before its sibling's prompt is computed (n > 1). WAITING: in the queue. WAITING_FOR_GRAMMAR,
    WAITING_FOR_STORE: beside it, until its grammar is ready, or its blocks are recalled. RUNNING: in the batch.
    WAITING_FOR_PICTURE: there, too, and its next rows are of a picture that is not encoded yet.
    """

    PENDING = 0
    WAITING = 1
    WAITING_FOR_GRAMMAR = 2
    WAITING_FOR_STORE = 3
    RUNNING = 4
    WAITING_FOR_PICTURE = 5
    FINISHED = 6


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
        """One of the same grammar that stands at the beginning."""
        ...


class Sequence:
    """One of a request's `n` rows of tokens.

    One rule moves it: every step brings `computed` closer to `len(tokens) + len(draft)`. Prefill, chunked prefill,
    prefix hits, decode, speculation, preemption and replay are all that rule; there is no phase flag.

    With an encoder, the first `encoded` tokens are the encoder's, and the decoder's begin at `lead`, which begins a
    block; what lies between is never read. Both are 0 otherwise.

    `blocks` holds a table per group of layers, all of one length, or nothing; the first `slid` entries of a table are
    SLID_OUT. `cache.tables` writes them.

    `draft` are tokens guessed to follow. They may branch: node j follows node `parents`[j] < j, or the last token where
    that is -1; without `parents` each follows the one before.

    `draftable`: False once a draft's rows gave no numbers. `drafted` tokens were guessed so far, `accepted` of them
    kept; `lookup` and `acceptance` are what a proposer and the cost model of drafts keep of it.

    `recalled`: how often its blocks were looked for in a store, at most once before each time that it runs.

    `guide`: of a request with a grammar, once it is ready; until then the sequence does not enter the queue.

    `pooled`: what `sched.pooled` keeps of a pooled request's hidden rows.

    `pictures`: of the prompt, whose rows are given instead of looked up.

    `in_flight`: tokens that steps under way will append; `computed` counts what these steps compute, too. `steps`: how
    many of them have a part of it.
    """

    __slots__ = (
        "acceptance",
        "accepted",
        "blocks",
        "cached_tokens",
        "computed",
        "draft",
        "draftable",
        "drafted",
        "encoded",
        "finish_reason",
        "first_scheduled",
        "first_token",
        "guide",
        "in_flight",
        "index",
        "keys",
        "last_token",
        "lead",
        "lookup",
        "miss",
        "order",
        "parent",
        "parents",
        "pictures",
        "pooled",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "recalled",
        "request",
        "slid",
        "status",
        "steps",
        "stop_token",
        "tokens",
    )

    def __init__(self, request: Request, index: int = 0, parent: Sequence | None = None) -> None:
        self.request = request
        self.index = index
        self.parent = parent
        self.tokens: list[int] = list(request.prompt)
        self.encoded = self.lead = 0
        if request.opening is not None:
            self.encoded, self.lead = len(self.tokens), request.opening.lead(len(self.tokens))
            self.tokens += [request.opening.start] * (self.lead + 1 - self.encoded)
        self.prompt_len = len(self.tokens)
        self.draft: list[int] = []
        self.parents: list[int] = []
        self.draftable = True
        self.drafted = self.accepted = 0
        self.lookup: object = None
        self.guide: Guide | None = None
        self.pooled: Any = None
        self.pictures: tuple[Picture, ...] = request.pictures
        self.acceptance = (0.0, 0.0)
        self.computed = 0
        self.in_flight = self.steps = 0
        self.blocks: list[list[int]] = []
        self.published = 0
        self.recalled = 0
        self.keys: list[bytes] = []
        self.order: tuple[float, int, int] = (0.0, 0, index)
        self.slid: list[int] = []
        self.cached_tokens = 0
        self.miss: Miss | None = None
        self.preemptions = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.status = Status.PENDING
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.first_scheduled = 0.0
        self.first_token = 0.0
        self.last_token = 0.0

    @property
    def target(self) -> int:
        """The length `computed` is moving toward."""
        return len(self.tokens) + self.in_flight + len(self.draft)

    def foretold(self, node: int, token: int) -> int | None:
        """The node that says `token` after `node` (-1: the last token), so that its row counts; None: no node does."""
        if not self.parents:
            follows = node + 1
            return follows if follows < len(self.draft) and self.draft[follows] == token else None
        for follows in range(node + 1, len(self.draft)):
            if self.parents[follows] == node and self.draft[follows] == token:
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
        """Shorten the draft to what the next `count` rows have of it."""
        beyond = self.target - self.computed - count
        if beyond > 0:
            del self.draft[max(0, len(self.draft) - beyond) :]

    def prune(self, nodes: list[int]) -> None:
        """Keep these nodes of the draft alone, in order; what each follows is one of them, or the last token."""
        if self.parents:
            places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
            self.parents = [places[self.parents[node]] for node in nodes]
        self.draft = [self.draft[node] for node in nodes]

    def prompt_tokens(self, start: int, end: int) -> int:
        """How many tokens from `start` to before `end` are of the request's prompt."""
        return max(0, min(end, self.encoded or self.prompt_len) - start)

    @property
    def output(self) -> list[int]:
        """The generated tokens, shape [len(tokens) - prompt_len]."""
        return self.tokens[self.prompt_len :]

    def __repr__(self) -> str:
        return f"Sequence({self.request.id}/{self.index} {self.computed}/{self.target} {self.status.name})"
