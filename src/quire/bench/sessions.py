"""What a load on a server asks for: conversations of one or several turns, whose tokens are made when they are sent.

Everything depends on the seed alone. Tokens are drawn anew for each turn, so a million prompts take no memory; equal
parts of prompts (a shared prefix, equal blocks of a trace) are drawn from equal keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from quire.bench.arrivals import due_times, kind_of
from quire.bench.loads import ServeLoad
from quire.bench.traces.read import read_trace
from quire.bench.traces.trace import Trace, Traced
from quire.bench.workload import FIRST_TOKEN, Length, bounds
from quire.core.errors import ConfigError

DEFAULT_REQUESTS = 100
MOST_TURNS = 1000
_PREFIX, _OWN, _BLOCK, _ANSWER = range(4)
"""What tokens are drawn for: the first part of their key."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """`new` makes the tokens that are said after all that was said before; `think`: seconds after the last answer."""

    new: Callable[[], list[int]]
    input_tokens: int
    output_tokens: int
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. Its first turn is due `due` seconds after the start."""

    due: float
    turns: tuple[SessionTurn, ...]

    @property
    def tokens(self) -> int:
        """Tokens of its last prompt and answer together: the context that it needs."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)


@dataclass
class Workload:
    """Sessions in order of when they are due; `warmup` ones come before. `name`: of the trace, or what it is."""

    sessions: list[Session]
    warmup: list[Session]
    arrivals: str
    name: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Turns in all."""
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True)
class ThinkTime:
    """Seconds, drawn uniformly from [low, high]."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str, what: str) -> ThinkTime:
        """Parse "0.5" or "0.5:2"."""
        return cls(*bounds(text, what, float, 0.0, "0.5:2"))


class RandomTokens:
    """Random ids of one seed and vocabulary."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed % (1 << 64)
        self._first, self._end = min(FIRST_TOKEN, vocab_size - 1), vocab_size
        self._block = lru_cache(maxsize=4096)(partial(self._drawn, _BLOCK))

    def _drawn(self, *key: int) -> np.ndarray:
        """The last of the key is how many."""
        rng = np.random.default_rng([self._seed, *(part % (1 << 64) for part in key[:-1])])
        return rng.integers(self._first, self._end, key[-1], dtype=np.int32)

    def prefix(self, count: int) -> list[int]:
        """What all prompts begin with."""
        return list(self._drawn(_PREFIX, count).tolist())

    def own(self, session: int, turn: int, count: int) -> list[int]:
        """What nobody else says."""
        return list(self._drawn(_OWN, session, turn, count).tolist())

    def answer(self, session: int, turn: int, count: int) -> list[int]:
        """Make random tokens in the place of an answer whose tokens the server does not tell."""
        return list(self._drawn(_ANSWER, session, turn, count).tolist())

    def blocks(self, names: tuple[int, ...], size: int, session: int, count: int) -> list[int]:
        """`count` tokens of blocks of `size`; own ones where blocks lack."""
        if not names:
            return self.own(session, 0, count)
        found = np.concatenate([self._block(name, size) for name in names])[:count].tolist()
        return [*found, *self.own(session, 0, count - len(found))]


def workload_of(load: ServeLoad, longest: int = 0) -> Workload:
    """All that `load` asks for; `ConfigError` where it cannot be. `longest`: tokens of the server's context, 0 unknown.

    Requests of a trace that do not fit are left out, and counted in the notes; others are refused.
    """
    arrivals = kind_of(load)
    turns = Length.parse(load.turns, "turns")
    if turns.high > MOST_TURNS:
        raise ConfigError(f"--turns {load.turns}: at most {MOST_TURNS}")
    if load.trace:
        if turns.high > 1 or load.shared_prefix:
            raise ConfigError("--turns and --shared-prefix go with made-up prompts, not with --trace", param="trace")
        return _traced(load, arrivals, longest)
    if load.length_scale != 1 or load.trace_speed != 1 or load.trace_layout:
        raise ConfigError("--length-scale, --trace-speed and --trace-layout change a trace; name it: --trace FILE")
    return _made_up(load, arrivals, turns, longest)


def _made_up(load: ServeLoad, arrivals: str, turns: Length, longest: int) -> Workload:
    inputs, outputs = Length.parse(load.input_len, "input-len"), Length.parse(load.output_len, "output-len")
    think, tokens = ThinkTime.parse(load.think_time, "think-time"), RandomTokens(load.seed, load.vocab_size)
    rng = random.Random(load.seed)
    prefix = tokens.prefix(load.shared_prefix)
    count = load.num_prompts or DEFAULT_REQUESTS

    def session(number: int, due: float) -> Session:
        found = []
        for turn in range(turns.draw(rng)):
            length = inputs.draw(rng)
            before = prefix if turn == 0 else []
            found.append(
                SessionTurn(
                    partial(_after, before, partial(tokens.own, number, turn, length)),
                    len(before) + length,
                    outputs.draw(rng),
                    think.low + (think.high - think.low) * rng.random() if turn else 0.0,
                )
            )
        return Session(due, tuple(found))

    sessions = [session(number, due) for number, due in enumerate(due_times(load, count))]
    warmup = [session(count + number, 0.0) for number in range(load.warmup)]
    most = max(session.tokens for session in (*sessions, *warmup))
    if longest and most > longest:
        raise ConfigError(
            f"a prompt and its answer take up to {most} tokens, but the server's context holds {longest}; lower "
            "--input-len, --output-len, --turns or --shared-prefix"
        )
    return Workload(sessions, warmup, arrivals, name="conversations" if turns.high > 1 else "")


def _after(before: list[int], own: Callable[[], list[int]]) -> list[int]:
    return [*before, *own()]


def _traced(load: ServeLoad, arrivals: str, longest: int) -> Workload:
    path = Path(load.trace)
    trace = read_trace(path, load.trace_layout, load.num_prompts)
    tokens = RandomTokens(load.seed, load.vocab_size)
    chosen: list[Traced] = []
    for request in trace.requests:
        read, written = _scaled(request.input_tokens, load), _scaled(request.output_tokens, load)
        if not longest or read + written <= longest:
            chosen.append(request)
    left_out = len(trace.requests) - len(chosen)
    if not chosen:
        raise ConfigError(
            f"--trace {path}: no request fits the server's context of {longest} tokens; --length-scale shrinks them"
        )
    if left_out:
        trace.notes.append(f"{left_out} requests of the trace do not fit the context of {longest} tokens: left out")
    due = due_times(load, len(chosen), [request.at for request in chosen])
    sessions = [
        Session(at, (_turn(load, trace, tokens, number, request),))
        for number, (at, request) in enumerate(zip(due, chosen, strict=True))
    ]
    warmup = [
        Session(0.0, (SessionTurn(partial(tokens.own, len(sessions) + i, 0, turn.input_tokens), turn.input_tokens, 2),))
        for i, turn in enumerate(session.turns[0] for session in sessions[: load.warmup])
    ]
    return Workload(sessions, warmup, arrivals, f"{trace.layout}:{path.name}", trace.notes)


def _turn(load: ServeLoad, trace: Trace, tokens: RandomTokens, number: int, request: Traced) -> SessionTurn:
    length = _scaled(request.input_tokens, load)
    new: Callable[[], list[int]]
    if request.prompt:
        new = partial(list, request.prompt[:length])
    else:
        block = max(1, round(trace.block_size * load.length_scale))
        new = partial(tokens.blocks, request.blocks, block, number, length)
    return SessionTurn(new, length, _scaled(request.output_tokens, load))


def _scaled(length: int, load: ServeLoad) -> int:
    return max(1, round(length * load.length_scale))
