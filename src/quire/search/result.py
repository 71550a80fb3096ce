"""What a search found, and what shared prefixes saved it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import BadRequest
from quire.engine.llm import LLM
from quire.engine.outputs import CompletionOutput


@dataclass(frozen=True, slots=True)
class Candidate:
    """One answer. `score`: what it was ranked by; `answer`: what was taken from its text, where answers vote."""

    text: str
    token_ids: list[int]
    score: float
    finish_reason: str | None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """Tokens of all prompts of a search: `asked` without any sharing, of which `computed` were computed.

    Both are counts of the engine's, not estimates: `asked` is the length of the prompt of every row that ran.
    """

    asked: int
    computed: int

    @property
    def found(self) -> int:
        """Tokens that were found among what had been computed."""
        return self.asked - self.computed

    @property
    def share(self) -> float:
        """`found` of `asked`."""
        return self.found / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best answer of a prompt, and all `candidates`, best first. `saved` is of the whole call."""

    text: str
    score: float
    candidates: list[Candidate]
    saved: Saved
    answer: str | None = None


@dataclass(slots=True)
class TokenMeter:
    """Counts what a search of `llm` asks for and computes from here on."""

    llm: LLM
    asked: int = 0
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = self.llm.engine.engine.prompt_tokens

    def add(self, prompt: Sequence[int], rows: int) -> None:
        """`rows` rows of tokens began with `prompt`."""
        self.asked += rows * len(prompt)

    def saved(self) -> Saved:
        """Tokens that were saved so far."""
        return Saved(self.asked, self.llm.engine.engine.prompt_tokens - self._before)


def likelihood(output: CompletionOutput) -> float:
    """Mean log-probability of a token, in nats: sums would favour short answers."""
    assert output.cumulative_logprob is not None, "log-probabilities were asked for"
    return output.cumulative_logprob / max(1, len(output.token_ids))


def check_count(name: str, value: int, most: int = 128) -> None:
    """`BadRequest` for a count out of [1, most]."""
    if type(value) is not int or not 1 <= value <= most:
        raise BadRequest(f"{name}: must be an integer in [1, {most}]", param=name)


def ids_of(llm: LLM, prompt: Any) -> list[int]:
    """Token ids of one prompt, as `LLM.generate` takes it."""
    if isinstance(prompt, str):
        return llm.get_tokenizer().encode(prompt)
    if isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
        return list(prompt)
    raise BadRequest(f"prompts: {prompt!r:.80} is neither text nor token ids", param="prompts")
