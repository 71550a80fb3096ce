"""A model without tensors: the KV cache is a dictionary of slots, the next token a hash of the whole prefix.

It fails loudly when a row reads a slot that does not hold exactly the token the sequence has there, written by its own
tenant and adapter, so that every fault in block ownership, copy-on-write, sharing or scrubbing becomes a wrong value
and not a silent one. A request in `poison` writes what is no number: no block that holds it may be published, and what
it leaves behind is wiped. `check` and `launch` hold the invariants of ownership, of which T11 is the list.

A step computes when it is launched or, on a `late` device, when its results are waited for: from what was known when it
was launched, and after all that were launched before it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from fake_states import NAN, FakeStates, NoStates
from quire.cache.blocks import BlockPool
from quire.cache.groups import TableSizes
from quire.cache.prefix import PrefixCache
from quire.cache.states import StateSlots
from quire.cache.tables import BlockTables
from quire.cache.tiers import Tiers
from quire.core.config import SchedulerConfig
from quire.core.errors import NumericError
from quire.core.params import SamplingParams
from quire.core.plan import BlockWork, Chunk, ChunkResult, StepPlan
from quire.core.request import Output, Request
from quire.core.sequence import SLID_OUT, Sequence, Status
from quire.sched.scheduler import Scheduler
from quire.speculate.draft_limits import room_for_drafts, undrafted
from turns import working

VOCAB = 50


def next_token(prefix: list[int], index: int) -> int:
    """The token that follows `prefix` in sequence `index` of a request."""
    data = (",".join(map(str, prefix)) + f"#{index}").encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") % VOCAB


def golden(request: Request, index: int, max_model_len: int) -> list[int]:
    """What the request must produce, whatever else the engine does meanwhile."""
    tokens = list(request.prompt)
    while len(tokens) < min(max_model_len, len(request.prompt) + (request.params.max_tokens or max_model_len)):
        tokens.append(next_token(tokens, index))
        if tokens[-1] in request.eos_token_ids:
            break
    return tokens[len(request.prompt) :]


class FakeEngine:
    """The real scheduler, tables, pool and prefix cache over a dictionary cache."""

    tiers: Tiers | None = None
    secret = b""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_model_len: int = 48,
        windows: tuple[int, ...] = (0,),
        prefix: bool = True,
        ahead: bool = False,
        late: bool = False,
        drafts: random.Random | None = None,
        **limits: object,
    ) -> None:
        slots, interval = (int(limits.pop(name, 0)) for name in ("slots", "interval"))  # type: ignore[call-overload]
        defaults: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
        config = SchedulerConfig(**(defaults | limits))  # type: ignore[arg-type]
        self.pool = BlockPool(num_blocks, watcher=self.tiers)
        self.states = NoStates()
        if slots:
            most, interval = config.max_num_seqs, interval if prefix else 0
            self.states = FakeStates(StateSlots(slots, block_size, interval, most, self.tiers))
        self.prefix = PrefixCache(self.pool, block_size, self.secret, states=self.states.pool) if prefix else None
        self.sizes = TableSizes(block_size, config.max_num_batched_tokens, windows)
        tables = BlockTables(self.pool, self.prefix, self.sizes, self.tiers, self.states.slots)
        self.scheduler = Scheduler(config, tables, max_model_len)
        self.block_size, self.windows, self.max_model_len = block_size, windows, max_model_len
        self.cache: dict[int, tuple[object, ...]] = {}
        self.poison: set[str] = set()
        self.sick: set[Sequence] = set()
        self._unwiped: set[int] = set()
        self._proved: dict[int, bytes] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Output] = {}
        self.ahead, self.late, self.drafts = ahead, late, drafts
        self.rejected = self.accepted = self.moved = self.steps_ahead = 0
        self._launched: tuple[StepPlan, Callable[[], list[ChunkResult]]] | None = None
        self._drawn: dict[Sequence, int] = {}

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def step(self) -> list[Output]:
        """Plan, run on the dictionary, commit, check every invariant."""
        if self.drafts is not None and self._launched is None:
            self.draft(self.drafts)
        plan, results = self._launched or self.launch()
        self._launched = self.launch() if self.ahead and self.scheduler.may_plan_ahead() else None
        self.steps_ahead += self._launched is not None
        found = results()
        for chunk, result in zip(plan.chunks, found, strict=True):
            if result.error is not None and chunk.seq.status is not Status.FINISHED:
                self._unwiped |= {b for table in chunk.seq.kv.blocks for b in table if b >= 0 and self.pool.writable(b)}
        outputs = self.scheduler.commit(plan, found)
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.ends, f"output after the end of {key}"
            self.outputs.setdefault(key, []).extend(out.tokens)
            if out.finish_reason:
                self.ends[key] = out
        self.check(plan)
        return outputs

    def launch(self) -> tuple[StepPlan, Callable[[], list[ChunkResult]]]:
        """Plan a step and give it to the device."""
        alone = not self.scheduler.running and len(self.scheduler.waiting)
        plan = self.scheduler.plan()
        assert plan.chunks or not alone or len(self.scheduler.recall), (
            "nobody runs, and who waits is neither admitted nor refused"
        )
        assert self._unwiped <= set(plan.blocks.wipes), "a block of a request that failed is not wiped"
        self._unwiped.clear()
        check_writers(self, plan)
        self.states.check_writers(plan)
        tables = [[list(table) for table in chunk.seq.kv.blocks] for chunk in plan.chunks]
        known = [[*chunk.seq.tokens, *chunk.seq.draft.tokens] for chunk in plan.chunks]
        if self.late:
            return plan, lambda: self.run(plan, tables, known)
        results = self.run(plan, tables, known)
        return plan, lambda: results

    def draft(self, rng: random.Random) -> None:
        """Guess tokens for some sequences, some of them right, after writing to their slots as a draft model would."""
        seqs = undrafted(self.scheduler)
        limits, before = room_for_drafts(self.scheduler, [(seq, rng.randint(0, 5)) for seq in seqs])
        self._unwiped -= set(before.blocks.wipes)
        self._prepare(before.blocks)
        for seq, room in zip(seqs, limits, strict=True):
            branches = rng.random() < 0.5 and self.states.slots is None
            for node in range(rng.randint(0, room)):
                seq.draft.parents += [rng.randint(-1, node - 1)] if branches else []
                branch = seq.draft.branch(seq.draft.parents[node] if branches else node - 1)
                right, before = rng.random() < 0.8, seq.tokens + [seq.draft.tokens[i] for i in branch]
                seq.draft.tokens.append(next_token(before, seq.index) if right else rng.randrange(VOCAB))
        for seq in self.scheduler.running:
            if seq.draft.tokens:
                self._scribble(seq)
            self.scheduler.tables.trim(seq)

    def _scribble(self, seq: Sequence) -> None:
        """A draft's own passes write what nobody may read to the slots that verification writes."""
        for table in seq.kv.blocks:
            for position in range(seq.computed, seq.target):
                block = table[position // self.block_size]
                assert self.pool.writable(block), f"{seq} would draft into a block that others read"
                self.cache[block * self.block_size + position % self.block_size] = (-1,)

    def _prepare(self, work: BlockWork) -> None:
        size = self.block_size
        for slot, place, _ in work.moves:
            self.cache[place] = self.cache[slot]
            self.moved += 1
        for block in work.wipes:
            for offset in range(size):
                self.cache.pop(block * size + offset, None)
        for source, destination in work.copies:
            for offset in range(size):
                value = self.cache.get(source * size + offset)
                if value is not None:
                    self.cache[destination * size + offset] = value

    def run(self, plan: StepPlan, tables: list[list[list[int]]], known: list[list[int]]) -> list[ChunkResult]:
        """Write and read slots as the kernels would; a token the host did not know is what the last step drew."""
        drawn, self._drawn, results = self._drawn, {}, []
        self._prepare(plan.blocks)
        for chunk, own, tokens in zip(plan.chunks, tables, known, strict=True):
            if chunk.start + chunk.count > len(tokens):
                tokens.append(drawn[chunk.seq])
            self._attend(chunk, own, tokens)
            self.states.run(chunk, tokens, chunk.seq in self.sick)
            results.append(self._draw(chunk, tokens))
        return results

    def _attend(self, chunk: Chunk, tables: list[list[int]], tokens: list[int]) -> None:
        """Write the chunk's slots and read all that its rows see."""
        size, end = self.block_size, chunk.start + chunk.count
        sick = chunk.seq.request.id in self.poison or chunk.seq in self.sick
        if sick:
            self.sick.add(chunk.seq)
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            for position in range(chunk.start, end):
                slot = table[position // size] * size + position % size
                self.cache[slot] = NAN if sick else self._value(chunk.seq, group, tokens, position)
            for position in range(max(0, chunk.start - window + 1) if window else 0, end):
                block = table[position // size]
                assert block != SLID_OUT, f"{chunk.seq} reads position {position}, which slid out"
                held = self.cache.get(block * size + position % size)
                want = self._value(chunk.seq, group, tokens, position)
                assert sick or held == want, f"{chunk.seq} reads a wrong value at {position}: {held}"

    def _value(self, seq: Sequence, group: int, tokens: list[int], place: int) -> tuple[object, ...]:
        """What the slot of position `place` holds: who may read it, and all that it depends on."""
        return (group, seq.request.adapter, seq.request.cache_salt, *self._before(seq, tokens, place))

    def _before(self, seq: Sequence, tokens: list[int], place: int) -> list[int]:
        """The tokens that the one in the slot of position `place` follows, and it."""
        if not seq.draft.tokens or place < len(seq.tokens):
            return tokens[: place + 1]
        return seq.tokens + [seq.draft.tokens[node] for node in seq.draft.branch(place - len(seq.tokens))]

    def _draw(self, chunk: Chunk, tokens: list[int]) -> ChunkResult:
        """The token of a chunk that ends its sequence, for the host and the next step; of drafts those that hold."""
        seq, end, result = chunk.seq, chunk.start + chunk.count, ChunkResult([], [], [])
        if seq.draft.tokens:
            return self._verify(chunk, tokens)
        if chunk.logits and (end == len(tokens) or end < seq.prompt_len):
            if end == len(tokens):
                self._drawn[seq] = next_token(tokens, seq.index)
            if seq in self.sick:
                result.error = NumericError("no numbers")
            elif end == len(tokens):
                result.tokens = [self._drawn[seq]]
            result.finite = result.error is None
        return result

    def _verify(self, chunk: Chunk, tokens: list[int]) -> ChunkResult:
        seq, result = chunk.seq, ChunkResult([], [], [], finite=True)
        assert chunk.logits == 1 + len(seq.draft.tokens) and chunk.start + chunk.count == len(tokens)
        if seq in self.sick:
            self.sick.remove(seq)  # it is wiped, and computed again without a draft: then it shows whose fault it was
            return ChunkResult([], [], [], retry_without_draft=True)
        node: int | None = -1
        while node is not None:
            token = next_token(self._before(seq, tokens, len(seq.tokens) + node), seq.index)
            result.tokens.append(token)
            node = seq.draft.matching_child(node, token)
            result.path += () if node is None else (node,)
        self.accepted += len(result.tokens) - 1
        self.rejected += len(seq.draft.tokens) + 1 - len(result.tokens)
        return result

    def check(self, plan: StepPlan) -> None:
        """The invariants of ownership and of a step's bounds."""
        self.pool.check()
        self.states.check(self.scheduler, filled(self, state=True))
        limits = self.scheduler.config
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.chunks) <= limits.max_num_seqs
        assert len({id(c.seq) for c in plan.chunks}) == len(plan.chunks)
        owners = [0] * self.pool.num_blocks
        for siblings in self.scheduler.requests.values():
            for seq in siblings:
                if seq.status is Status.FINISHED:
                    assert not seq.kv.blocks
                assert len({len(table) for table in seq.kv.blocks}) <= 1, "tables of unlike lengths"
                for table, slid in zip(seq.kv.blocks, seq.kv.slid, strict=True):
                    assert len(table) <= -(-seq.target // self.block_size)
                    assert table.count(SLID_OUT) == table[:slid].count(SLID_OUT) == slid
                    for block in table[slid:]:
                        owners[block] += 1
                held = sum(len(table) - slid for table, slid in zip(seq.kv.blocks, seq.kv.slid, strict=True))
                # What slides out is not free before the step that writes behind it is planned.
                more = sum(map(bool, self.windows)) * self.sizes.entries(self.sizes.max_chunk) if self.ahead else 0
                assert held <= self.sizes.footprint(seq.target) + more, "more blocks than were promised"
        assert owners == list(self.pool.refs), "reference counts differ from the owners that exist"
        cached = sum(not self.pool.refs[block] for block in self.pool._by_key.values())
        free = self.pool.num_free - cached
        assert free >= 0 and free + self.pool.num_used + cached == self.pool.num_blocks
        self._check_published()

    def _check_published(self) -> None:
        """A block is published once its values are there, are numbers, and are of the tokens that it is found by."""
        size, owed = self.block_size, {place for _, place, _ in self.scheduler.block_work.moves}
        proved, self._proved = self._proved, {}
        unread = filled(self, state=False)  # before the rows of their plan run
        for key, block in self.pool._by_key.items():
            if block in unread or owed & set(range(block * size, (block + 1) * size)):
                continue  # what was kept of a draft is moved there before anybody reads it
            self._proved[block] = key
            if proved.get(block) == key:
                continue
            before: tuple[object, ...] = ()
            for slot, token in enumerate(self.pool.tokens(block), block * size):
                held = self.cache.get(slot, NAN)
                assert held != NAN and held[-1] == token, f"block {block} is published and holds {held} at {slot}"
                assert held[:-1] == before or not before, f"block {block} is of several sequences"
                before = held

    def drain(self, limit: int = 5000) -> None:
        """Step until nothing is left; a bounded number of steps must do."""
        for _ in working(self.scheduler, limit):
            self.step()
        assert not self.scheduler.requests, "a request is remembered without work"
        assert self.pool.num_used == 0
        self.states.check_drained()


def filled(engine: FakeEngine, state: bool) -> set[int]:
    """Blocks, or slots of states, that a plan fills whose rows did not run yet."""
    launched = engine._launched[0].blocks.fills if engine._launched else ()
    fills = [*launched, *(engine.tiers.fills if engine.tiers else ())]
    return {fill.block for fill in fills if fill.state == state}


def check_writers(engine: FakeEngine, plan: StepPlan) -> None:
    """What a step writes belongs to one sequence, and nobody else can find it."""
    written: list[int] = []
    for chunk in plan.chunks:
        first, end = chunk.start // engine.block_size, engine.sizes.entries(chunk.start + chunk.count)
        written += [block for table in chunk.seq.kv.blocks for block in table[first:end]]
    assert len(written) == len(set(written)), "two sequences would write one block"
    assert all(map(engine.pool.writable, written)), "a block that others have would be written"


def request(name: str, prompt: list[int], max_tokens: int, n: int = 1, salt: str = "", priority: int = 0,
            eos: tuple[int, ...] = (7,), **params: float) -> Request:  # fmt: skip
    """A request for the fake engine, which ignores `params`."""
    return Request(
        id=name,
        prompt=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, n=n, **params),  # type: ignore[arg-type]
        seed=0,
        arrival=0.0,
        eos_token_ids=eos,
        cache_salt=salt,
        priority=priority,
    )
