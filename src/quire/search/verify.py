"""Verifiers: who says how good a text is, higher is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.errors import BadRequest
from quire.engine.llm import LLM

Verifier = Callable[[str, list[str]], Sequence[float]]
"""(prompt, answers to it) -> a finite number for each."""


@dataclass(frozen=True)
class ScoreBy:
    """Another model as the verifier: `LLM.score` of the prompt and each answer.

    A model of classes (a reward model with one class, a reranker) reads both behind each other; a model of vectors
    gives their cosine.
    """

    llm: LLM

    def __call__(self, prompt: str, answers: list[str]) -> list[float]:
        """A score for each of `answers`."""
        return [found.outputs.score for found in self.llm.score(prompt, answers, use_tqdm=False)]


def judged(verifier: Verifier, prompt: str, answers: list[str]) -> list[float]:
    """What `verifier` says; `BadRequest` where that is not a finite number for each."""
    scores = [float(score) for score in verifier(prompt, answers)] if answers else []
    if len(scores) != len(answers) or not all(map(math.isfinite, scores)):
        raise BadRequest(f"verifier: must give a finite number for each of {len(answers)} answers", param="verifier")
    return scores
