"""What is asked of a cluster: requests with the contents of their prompts in place of tokens, drawn or from a trace.

A content is a number, and so many tokens of it are that number as often: two prompts share what they have in common
from their beginnings on, block by block, as their texts would, and a prompt costs no more than a list of its length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from quire.bench.workload import Length
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request

OWN, ANSWER, SHARED = 1 << 40, 1 << 41, 1 << 42
"""Where the numbers of contents begin that only one prompt has, that are a request's answer, and that some share."""


class Ask(NamedTuple):
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
        """As an engine takes it: it decodes to its full length, or to `longest` tokens with its prompt."""
        prompt: tuple[int, ...] = ()
        for content, tokens in self.parts:
            prompt += (content,) * tokens
        output = max(1, min(self.output, longest - len(prompt)))
        return Request(
            id=name, prompt=prompt, params=_params(output), seed=self.answer, arrival=self.due,
            tenant=self.tenant, weight=self.weight, priority=self.priority, cache_salt=self.tenant,
        )  # fmt: skip


@cache
def _params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class Tenant:
    """Who asks: a share of all requests, a weight for the fair policy, a priority for the other."""

    name: str = ""
    share: float = 1.0
    weight: float = 1.0
    priority: int = 0

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """From "name=share", "name=share:weight" or "name=share:weight:priority"."""
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


@dataclass(frozen=True)
class Drawn:
    """Requests of random lengths and arrivals, the same for the same `seed`.

    Each prompt begins with one of `prefixes` shared texts of `shared_prefix` tokens. Gaps between arrivals are
    gamma-distributed, as in `bench.serving.due_times`: `burstiness` 1 is Poisson.
    """

    count: int
    inputs: Length
    outputs: Length
    rate: float
    burstiness: float = 1.0
    shared_prefix: int = 0
    prefixes: int = 1
    tenants: tuple[Tenant, ...] = (Tenant(),)
    seed: int = 0

    def __iter__(self) -> Iterator[Ask]:
        rng, due, bursty = random.Random(self.seed), 0.0, self.burstiness
        shares = [tenant.share for tenant in self.tenants]
        for number in range(self.count):
            if number and math.isfinite(self.rate):
                due += rng.gammavariate(bursty, 1 / (self.rate * bursty))
            [who] = rng.choices(self.tenants, shares) if len(shares) > 1 else self.tenants
            own = (OWN + number, self.inputs.draw(rng))
            parts: tuple[tuple[int, int], ...] = (own,)
            if self.shared_prefix:
                parts = ((SHARED + rng.randrange(self.prefixes), self.shared_prefix), own)
            output = self.outputs.draw(rng)
            yield Ask(due, parts, output, ANSWER + number, who.name, who.weight, who.priority)
