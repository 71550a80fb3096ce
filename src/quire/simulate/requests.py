"""What is asked of a cluster: requests with the contents of their prompts in place of tokens, drawn or from a trace.

A content is a number, and so many tokens of it are that number as often: two prompts share what they have in common
from their beginnings on, block by block, as their texts would, and a prompt costs no more than a list of its length.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quire.bench.arrivals import due_times, kind_of
from quire.bench.traces.read import read_trace
from quire.bench.workload import Length
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.simulate.simulate_options import SimulatedLoad

OWN, ANSWER, SHARED = 1 << 40, 1 << 41, 1 << 42
"""Where the numbers of contents begin that only one prompt has, that are a request's answer, and that some share."""


class SimulatedRequest(NamedTuple):
    """One request, `due` seconds after the start. `parts`: (content, tokens) of its prompt, in order; `output` tokens
    follow, whose content is `answer`."""

    due: float
    parts: tuple[tuple[int, int], ...]
    output: int
    answer: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(tokens for _, tokens in self.parts)

    def request(self, name: str, longest: int) -> Request:
        """The request as an engine takes it: it decodes to its full length, or to `longest` tokens with its prompt."""
        prompt: list[int] = []
        for content, tokens in self.parts:
            prompt += [content] * tokens
        output = max(1, min(self.output, longest - len(prompt)))
        return Request(
            id=name, prompt=tuple(prompt), params=_params(output), seed=self.answer, arrival=self.due,
            tenant=self.tenant, weight=self.weight, priority=self.priority, cache_salt=self.tenant,
        )  # fmt: skip


@cache
def _params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class SimulatedTenant:
    """Who asks: a share of all requests, a weight for the fair policy, a priority for the other."""

    name: str = ""
    share: float = 1.0
    weight: float = 1.0
    priority: int = 0

    @classmethod
    def parse(cls, text: str) -> SimulatedTenant:
        """Parse "name=share", "name=share:weight" or "name=share:weight:priority"."""
        name, _, numbers = text.partition("=")
        share, weight, priority, *rest = (*numbers.split(":"), "", "")
        try:
            if any(rest) or not name:
                raise ValueError
            tenant = cls(name, float(share), float(weight or 1), int(priority or 0))
        except ValueError:
            raise ConfigError(f"--tenant {text!r} is not like name=share:weight:priority, as in web=0.7:2:0") from None
        if not (0 < tenant.share < math.inf and 0 < tenant.weight < math.inf):
            raise ConfigError(f"--tenant {text!r}: share and weight must be positive numbers")
        return tenant


DEFAULT_REQUESTS = 1000


class RequestStream:
    """The requests of a `SimulatedLoad`, made anew each time that they are walked, the same for the same seed."""

    def __init__(self, load: SimulatedLoad, trace: str = "") -> None:
        """Reads `trace`, if one is named. `ConfigError` for what cannot be."""
        self.load, self._path = load, Path(trace)
        self.trace = read_trace(self._path, load.trace_layout, load.num_prompts) if trace else None
        if self.trace is not None and load.shared_prefix:
            raise ConfigError("--shared-prefix goes with made-up prompts, not with a trace", param="shared_prefix")
        if self.trace is None and (load.length_scale != 1 or load.trace_speed != 1 or load.trace_layout):
            raise ConfigError("--length-scale, --trace-speed and --trace-layout change a trace, and none is named")
        self.tenants = tuple(map(SimulatedTenant.parse, load.tenant)) or (SimulatedTenant(),)
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            raise ConfigError("--tenant: each name once", param="tenant")
        self._inputs = Length.parse(load.input_len, "input-len")
        self._outputs = Length.parse(load.output_len, "output-len")
        self.count = len(self.trace.requests) if self.trace else load.num_prompts or DEFAULT_REQUESTS
        served = load.served(trace)
        self.arrivals = kind_of(served)
        traced = [request.at for request in self.trace.requests] if self.trace else []
        self._due = array("d", due_times(served, self.count, traced))

    def __len__(self) -> int:
        return self.count

    @property
    def name(self) -> str:
        """Name of the trace."""
        return f"{self.trace.layout}:{self._path.name}" if self.trace is not None else ""

    @property
    def rate(self) -> float:
        """Requests a second offered, on average; 0 where all come at once."""
        return (self.count - 1) / self._due[-1] if self._due[-1] > 0 else 0.0

    @property
    def means(self) -> tuple[float, float]:
        """Tokens of prompts and of answers."""
        if self.trace is None:
            low, high = self._inputs, self._outputs
            return self.load.shared_prefix + (low.low + low.high) / 2, (high.low + high.high) / 2
        found, scale = self.trace.requests, self.load.length_scale
        read, written = sum(each.input_tokens for each in found), sum(each.output_tokens for each in found)
        return scale * read / self.count, scale * written / self.count

    def __iter__(self) -> Iterator[SimulatedRequest]:
        rng, shares = random.Random(f"load {self.load.seed}"), [tenant.share for tenant in self.tenants]
        for number, due in enumerate(self._due):
            parts, output = self._made_up(number, rng) if self.trace is None else self._traced(number)
            [who] = rng.choices(self.tenants, shares) if len(shares) > 1 else self.tenants
            yield SimulatedRequest(due, parts, output, ANSWER + number, who.name, who.weight, who.priority)

    def _made_up(self, number: int, rng: random.Random) -> tuple[tuple[tuple[int, int], ...], int]:
        own, load = (OWN + number, self._inputs.draw(rng)), self.load
        output = self._outputs.draw(rng)
        if not load.shared_prefix:
            return (own,), output
        return ((SHARED + rng.randrange(load.prefixes), load.shared_prefix), own), output

    def _traced(self, number: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """Contents are blocks' names; tokens that were recorded are contents of one token each."""
        assert self.trace is not None
        found, scale = self.trace.requests[number], self.load.length_scale
        length, output = (max(1, round(tokens * scale)) for tokens in (found.input_tokens, found.output_tokens))
        if found.prompt:
            return tuple((token, 1) for token in found.prompt[:length]), output
        if not found.blocks:
            return ((OWN + number, length),), output
        size = max(1, round(self.trace.block_size * scale))
        blocks = found.blocks[: -(-length // size)]
        parts = tuple((name, min(size, length - at * size)) for at, name in enumerate(blocks))
        rest = length - size * len(blocks)
        return (*parts, (OWN + number, rest)) if rest > 0 else parts, output
