"""Evaluation of any model on the sets that come with quire, and of two models side by side.

Both models answer the same questions and read the same pieces of text, so a difference is one of pairs, whose error is
smaller than that of two separate figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from quire.bench.quality import TextScore, general_heldout, score_texts
from quire.bench.question_sets import CONFIDENCE, Marks, answer, choice_questions, choose, short_questions
from quire.core.errors import BadRequest
from quire.engine.llm import LLM

SETS = ("text", "choices", "answers")
PIECE = 4000
"""Characters of a piece of text, each of which is read from an empty context."""
MISSES = 3
"""Questions that were missed and are named."""


@dataclass(frozen=True)
class SetScores:
    """Scores of one model: of pieces of text by name, of questions with choices, and with short answers.

    None: the set was not asked for. `chat`: whether questions went through a chat template.
    """

    text: Mapping[str, TextScore] | None
    choices: Marks | None
    answers: Marks | None
    chat: bool


@dataclass(frozen=True)
class Difference:
    """A figure of two models, the first less the second, and the standard error of that over pairs."""

    name: str
    first: float
    second: float
    error: float
    unit: str

    @property
    def change(self) -> float:
        """The first less the second."""
        return self.first - self.second

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than chance gives in 95 of 100 samples."""
        return abs(self.change) > CONFIDENCE * self.error


def pieces(texts: Mapping[str, str]) -> dict[str, str]:
    """Cut texts into pieces of `PIECE` characters, by name and number."""
    return {
        f"{name} {at // PIECE + 1}": text[at : at + PIECE]
        for name, text in texts.items()
        for at in range(0, len(text), PIECE)
        if len(text[at : at + PIECE]) > 1
    }


def has_chat_template(llm: LLM) -> bool:
    """Whether the model knows conversations."""
    try:
        return llm.chat_template is not None
    except BadRequest:
        return False


def measure_sets(
    llm: LLM,
    sets: Collection[str] = SETS,
    limit: int = 0,
    texts: Mapping[str, str] | None = None,
    chat: bool | None = None,
) -> SetScores:
    """Score a model on `sets`.

    `limit`: pieces and questions of a set at most, 0 = all. `texts` in place of the shipped text. `chat`: ask through
    the chat template; None = where there is one.
    """
    asked = has_chat_template(llm) if chat is None else chat
    text = None
    if "text" in sets:
        cut = pieces(general_heldout() if texts is None else texts)
        step = max(1, len(cut) // limit) if limit else 1
        kept = dict(list(cut.items())[::step][: limit or None])
        text = score_texts(llm, kept)[1]
    choices = choose(llm, choice_questions(limit)) if "choices" in sets else None
    answers = answer(llm, short_questions(limit), asked) if "answers" in sets else None
    return SetScores(text, choices, answers, asked)


def bits_per_byte(text: Mapping[str, TextScore]) -> float:
    """Bits that a byte of the text takes."""
    return _nats(text) / math.log(2) / sum(score.size for score in text.values())


def text_perplexity(text: Mapping[str, TextScore]) -> float:
    """Perplexity of a token of the model's own; models with other tokens are compared by bits per byte."""
    return math.exp(_nats(text) / sum(score.tokens for score in text.values()))


def _nats(text: Mapping[str, TextScore]) -> float:
    return math.fsum(score.nll for score in text.values())


def domains(text: Mapping[str, TextScore]) -> dict[str, dict[str, TextScore]]:
    """The pieces of each text."""
    found: dict[str, dict[str, TextScore]] = {}
    for name, score in text.items():
        found.setdefault(name.rpartition(" ")[0], {})[name] = score
    return found


def summary(scores: SetScores) -> dict[str, Any]:
    """The scores as JSON has them; `margin`: half the width of the 95 % interval, in percent."""
    found: dict[str, Any] = {"chat": scores.chat}
    if scores.text is not None:
        of = {name: bits_per_byte(part) for name, part in domains(scores.text).items()}
        found["text"] = {
            "bits_per_byte": bits_per_byte(scores.text), "perplexity": text_perplexity(scores.text),
            "tokens": sum(score.tokens for score in scores.text.values()),
            "bytes": sum(score.size for score in scores.text.values()), "pieces": len(scores.text),
            "bits_per_byte_by_text": of,
        }  # fmt: skip
    for name, marks in (("choices", scores.choices), ("answers", scores.answers)):
        if marks is not None:
            found[name] = {
                "right": sum(marks.right), "total": len(marks.right), "percent": 100 * marks.share,
                "margin": 100 * marks.margin, "by_subject": marks.by_subject(),
            }  # fmt: skip
    return found


def differences(first: SetScores, second: SetScores) -> list[Difference]:
    """Compare two models on the sets that both were scored on."""
    found = []
    if first.text is not None and second.text is not None:
        pairs = [(score.nll - second.text[name].nll) / math.log(2) for name, score in first.text.items()]
        size = sum(score.size for score in first.text.values())
        error = math.sqrt(len(pairs)) * _spread(pairs) / size
        found.append(Difference("bits per byte", bits_per_byte(first.text), bits_per_byte(second.text), error, ""))
    for name, one, two in (("choices", first.choices, second.choices), ("answers", first.answers, second.answers)):
        if one is not None and two is not None:
            deltas = [float(a) - float(b) for a, b in zip(one.right, two.right, strict=True)]
            error = 100 * _spread(deltas) / math.sqrt(len(deltas))
            found.append(Difference(name, 100 * one.share, 100 * two.share, error, " %"))
    return found


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
