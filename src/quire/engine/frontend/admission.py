"""How much may be in flight: sequences, counted before their prompts are read, tokens of prompts, and whose."""

from __future__ import annotations

import math
from collections import Counter

from quire.core.errors import BadRequest, Overloaded
from quire.core.request import Request

MAX_RETRY_AFTER = 60
CROWD = 8
"""A tenant may have this many times what is left of the queue: alone 8/9 of it, two of them 8/17 each. So there is
always room for another (dynamic thresholds, Choudhury & Hahne 1998)."""


def image_bytes(request: Request) -> int:
    """Bytes of the pixels that a request brings."""
    return sum(len(image.pixels) for image in request.images)


class AdmissionControl:
    """What is in flight. Whatever does not fit beside it is refused, with the seconds after which it may.

    `image_bytes`: of pixels that requests in flight brought; whoever prepares images bounds it.
    `fair`: the queue is shared among tenants as well.
    """

    def __init__(self, max_sequences: int, max_prompt_tokens: int, fair: bool = False) -> None:
        self.max_sequences = max_sequences
        self.max_prompt_tokens = max_prompt_tokens
        self.fair = fair
        self.sequences = self.prompt_tokens = self.image_bytes = 0
        self._held: Counter[str] = Counter()
        self._latency = 1.0

    @property
    def held(self) -> dict[str, int]:
        """Sequences in flight of each tenant that has any."""
        return dict(self._held)

    @property
    def full(self) -> bool:
        """Whether nobody gets in."""
        return self.sequences >= self.max_sequences

    def enter(self, sequences: int, prompt_tokens: int, tenant: str = "", most: int = 0) -> None:
        """Count these. `Overloaded` when they do not fit beside what is in flight, `BadRequest` when they never could.

        Prompts of any length are taken where there are no others. `most`: sequences that `tenant` may have in flight;
        0 = no limit of its own.
        """
        if sequences > self.max_sequences:
            raise BadRequest(
                f"n: the request asks for {sequences} sequences, this server queues {self.max_sequences} in all",
                param="n",
            )
        if most and sequences > most:
            raise BadRequest(f"n: the request asks for {sequences} sequences, its key allows {most} in all", param="n")
        full = self.sequences + sequences > self.max_sequences
        heavy = self.prompt_tokens > 0 and self.prompt_tokens + prompt_tokens > self.max_prompt_tokens
        if full or heavy:
            what = f"{self.sequences} sequences with {self.prompt_tokens} prompt tokens are in flight"
            raise self._overloaded(f"the queue is full ({what})")
        held = self._held[tenant]
        if most and held + sequences > most:
            raise self._overloaded(f"the key of {tenant} has {held} of {most} sequences in flight")
        left = self.max_sequences - self.sequences - sequences
        if self.fair and held and held + sequences > CROWD * left:
            raise self._overloaded(f"{held} sequences of this tenant are in flight, and what is left is for others")
        self.sequences += sequences
        self.prompt_tokens += prompt_tokens
        self._held[tenant] += sequences

    def _overloaded(self, why: str) -> Overloaded:
        wait = min(MAX_RETRY_AFTER, max(1, math.ceil(self._latency)))
        return Overloaded(f"{why}; try again in {wait} s", retry_after=wait)

    def leave(self, sequences: int, prompt_tokens: int, tenant: str = "") -> None:
        """Take these off the count."""
        self.sequences -= sequences
        self.prompt_tokens -= prompt_tokens
        self._held[tenant] -= sequences
        if not self._held[tenant]:
            del self._held[tenant]

    def took(self, seconds: float) -> None:
        """Note how long a request was in flight."""
        self._latency += 0.1 * (seconds - self._latency)
