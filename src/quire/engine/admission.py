"""How much may be in flight: sequences, counted before their prompts are read, and tokens of prompts."""

from __future__ import annotations

import math

from quire.core.errors import BadRequest, Overloaded

MAX_RETRY_AFTER = 60


class Admission:
    """What is in flight. Whatever does not fit beside it is refused, with the seconds after which it may."""

    def __init__(self, max_sequences: int, max_prompt_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_prompt_tokens = max_prompt_tokens
        self.sequences = self.prompt_tokens = 0
        self._latency = 1.0

    def enter(self, sequences: int, prompt_tokens: int) -> None:
        """Count these. `Overloaded` when they do not fit beside what is in flight, `BadRequest` when they never could.

        Prompts of any length are taken where there are no others.
        """
        if sequences > self.max_sequences:
            raise BadRequest(
                f"n: the request asks for {sequences} sequences, this server queues {self.max_sequences} in all",
                param="n",
            )
        full = self.sequences + sequences > self.max_sequences
        heavy = self.prompt_tokens > 0 and self.prompt_tokens + prompt_tokens > self.max_prompt_tokens
        if full or heavy:
            wait = min(MAX_RETRY_AFTER, max(1, math.ceil(self._latency)))
            what = f"{self.sequences} sequences with {self.prompt_tokens} prompt tokens are in flight"
            raise Overloaded(f"the queue is full ({what}); try again in {wait} s", retry_after=wait)
        self.sequences += sequences
        self.prompt_tokens += prompt_tokens

    def leave(self, sequences: int, prompt_tokens: int) -> None:
        """Take these off the count."""
        self.sequences -= sequences
        self.prompt_tokens -= prompt_tokens

    def took(self, seconds: float) -> None:
        """Note how long a request was in flight."""
        self._latency += 0.1 * (seconds - self._latency)
