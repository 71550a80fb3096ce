"""The questions that come with quire, for any model: choices by their likelihood, and short answers.

A choice is scored as a continuation of the question, so base models are measured as chat models are: its log-likelihood
by byte, as `acc_norm` of the LM Evaluation Harness. Short answers go through the chat template where there is one, and
else after three examples.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.progress import counting_bar
from quire.core.request import longest_prompt
from quire.engine.llm import LLM

T = TypeVar("T")
FOLDER = Path(__file__).resolve().parents[1] / "assets" / "questions"
ANSWER_TOKENS = 48
"""Tokens of a short answer; of what a model writes its first line counts."""
ASKED = "Answer with the word or the number alone."
EXAMPLES = (
    ("What is the capital of Denmark?", "Copenhagen"),
    ("What is 2 + 2?", "4"),
    ("Which colour has a ripe banana?", "yellow"),
)
"""What a model without a chat template sees first."""
CONFIDENCE = 1.96
"""Standard errors on both sides of a share that hold 95 of 100 samples."""


class ChoiceQuestion(msgspec.Struct, frozen=True):
    """A question with choices, of which `answer` is the index of the right one."""

    subject: str
    question: str
    choices: list[str]
    answer: int


class ShortQuestion(msgspec.Struct, frozen=True):
    """A question with a short answer; `answers` are the spellings that count."""

    subject: str
    question: str
    answers: list[str]


@dataclass(frozen=True)
class Marks:
    """Which questions of a set were answered right, in their order, and what was answered."""

    subjects: tuple[str, ...]
    right: tuple[bool, ...]
    given: tuple[str, ...]

    @property
    def share(self) -> float:
        """The part that is right, from 0 to 1."""
        return sum(self.right) / len(self.right)

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval of `share`."""
        return CONFIDENCE * math.sqrt(self.share * (1 - self.share) / len(self.right))

    def by_subject(self) -> dict[str, tuple[int, int]]:
        """Right answers and questions of each subject."""
        found: dict[str, tuple[int, int]] = {}
        for subject, right in sorted(zip(self.subjects, self.right, strict=True)):
            before = found.get(subject, (0, 0))
            found[subject] = before[0] + right, before[1] + 1
        return found


def choice_questions(limit: int = 0) -> list[ChoiceQuestion]:
    """The shipped questions with choices, `limit` of them spread evenly (0 = all)."""
    decode = msgspec.json.Decoder(ChoiceQuestion).decode
    return _spread([decode(line) for line in (FOLDER / "choices.jsonl").read_bytes().splitlines()], limit)


def short_questions(limit: int = 0) -> list[ShortQuestion]:
    """The shipped questions with short answers, `limit` of them spread evenly (0 = all)."""
    decode = msgspec.json.Decoder(ShortQuestion).decode
    return _spread([decode(line) for line in (FOLDER / "answers.jsonl").read_bytes().splitlines()], limit)


def _spread(rows: list[T], limit: int) -> list[T]:
    return rows[:: max(1, len(rows) // limit)][:limit] if limit else rows


def choose(llm: LLM, questions: Sequence[ChoiceQuestion]) -> Marks:
    """Take for each question the choice that is likeliest by byte. `ConfigError` for a context that is too short."""
    tokenizer, size = llm.get_tokenizer(), longest_prompt(llm.info.max_model_len)
    jobs: list[tuple[list[int], int]] = []
    for question in questions:
        stem = f"Question: {question.question}\nAnswer:"
        before = tokenizer.encode(stem)
        for choice in question.choices:
            ids = tokenizer.encode(f"{stem} {choice}")
            same = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
            jobs.append((ids, max(1, min(same, len(ids) - 1))))
    if (longest := max(len(ids) for ids, _ in jobs)) > size:
        raise ConfigError(
            f"the questions have up to {longest} tokens and the model reads {size}; give --set text alone"
        )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    scores = [0.0] * len(jobs)
    with counting_bar(len(jobs), "choices") as count:
        for delta in llm.stream([{"prompt_token_ids": ids} for ids, _ in jobs], params):
            if delta.output is None:
                continue
            ids, first = jobs[delta.prompt]
            entries = (delta.output.prompt_logprobs or [])[first:]
            scores[delta.prompt] = math.fsum(
                entry[t].logprob for t, entry in zip(ids[first:], entries, strict=True) if entry is not None
            )
            count()
    taken, at = list[int](), 0
    for question in questions:
        own = [scores[at + i] / len(choice.encode()) for i, choice in enumerate(question.choices)]
        taken.append(own.index(max(own)))
        at += len(own)
    return Marks(
        tuple(q.subject for q in questions),
        tuple(i == q.answer for i, q in zip(taken, questions, strict=True)),
        tuple(q.choices[i] for i, q in zip(taken, questions, strict=True)),
    )


def answer(llm: LLM, questions: Sequence[ShortQuestion], chat: bool) -> Marks:
    """Ask for short answers, greedily; `chat`: through the chat template.

    An answer is right if a spelling that counts stands in its first line as words of their own.
    """
    if chat:
        asked = [[{"role": "user", "content": f"{q.question} {ASKED}"}] for q in questions]
        prompts = [llm.chat_template.encode(messages, enable_thinking=False) for messages in asked]
        stop: tuple[str, ...] = ()
    else:
        examples = "".join(f"Question: {question}\nAnswer: {reply}\n\n" for question, reply in EXAMPLES)
        encode = llm.get_tokenizer().encode
        prompts, stop = [encode(f"{examples}Question: {q.question}\nAnswer:") for q in questions], ("\n",)
    room = llm.info.max_model_len - max(map(len, prompts))
    if room < 2:
        raise ConfigError("the model's context is too short for the questions; give --set text alone")
    params = SamplingParams(temperature=0.0, max_tokens=min(ANSWER_TOKENS, room), stop=stop)
    given = [""] * len(questions)
    with counting_bar(len(questions), "questions") as count:
        for delta in llm.stream([{"prompt_token_ids": p} for p in prompts], params):
            if delta.output is not None:
                given[delta.prompt] = delta.output.outputs[0].text
                count()
    right = tuple(is_right(text, question.answers) for text, question in zip(given, questions, strict=True))
    return Marks(tuple(q.subject for q in questions), right, tuple(given))


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether one of `answers` stands in the first line of `text` as words of their own; case does not count."""
    line = _plain(next((line for line in text.splitlines() if line.strip()), ""))
    return any(_stands_in(_plain(each), line) for each in answers)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold().strip()


def _stands_in(answer: str, line: str) -> bool:
    if any(unicodedata.category(letter) == "Lo" for letter in answer):  # scripts that write no spaces between words
        return answer in line
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|[.,]\d)", line) is not None
