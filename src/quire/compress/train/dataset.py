"""Training data: rows of plain text, of which all is learned, and of prompts, of which the answers are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import BadRequest, ConfigError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

IGNORE_INDEX = -100
"""A target of no loss, as torch's cross entropy has it."""
RATIONALE_PREFIX = "Explain step by step: "
"""Before a prompt whose rationale is learned. Answers have no prefix (the paper has one for both tasks), so that the
model that is served needs none."""
FORMS = 'needs "text", "prompt" and "completion", or "messages"'


@dataclass(frozen=True)
class TrainingRow:
    """A row of `tokens`, of which those from place `start` on are learned. `weight` of their loss beside that of
    others."""

    tokens: list[int]
    start: int = 1
    weight: float = 1.0


@dataclass(frozen=True)
class TrainingBatch:
    """Rows one after the other, of T tokens in all: filled up to the longest they would be twice as many in answers.

    tokens [1, T] int64, without each row's last, which nothing follows; lengths [B] int64; targets [T] int64: the token
    that is to follow, or `IGNORE_INDEX`; weights [T] f32: of the rows; `rows`: their numbers among all.
    """

    tokens: Tensor
    lengths: Tensor
    targets: Tensor
    weights: Tensor
    rows: tuple[int, ...] = ()


def collate(rows: Sequence[tuple[int, TrainingRow]]) -> TrainingBatch:
    """Make one batch of rows with their numbers."""
    tokens = [token for _, row in rows for token in row.tokens[:-1]]
    targets = [
        token if at >= row.start else IGNORE_INDEX for _, row in rows for at, token in enumerate(row.tokens) if at
    ]
    lengths = torch.tensor([len(row.tokens) - 1 for _, row in rows])
    weights = torch.tensor([row.weight for _, row in rows]).repeat_interleave(lengths)
    return TrainingBatch(
        torch.tensor([tokens]), lengths, torch.tensor(targets), weights, tuple(number for number, _ in rows)
    )


class TextDataset:
    """Texts as rows of at most `length` tokens. `rationales`: the weight of explanations that files have, 0: unread.

    `cut`: rows that had more tokens, of which the first are kept; `left_out`: of those, rows with nothing to learn in
    what would be kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, length: int, rationales: float = 0.0
    ) -> None:
        self._tokenizer, self._template, self._length, self._rationales = tokenizer, template, length, rationales
        self.cut = self.left_out = 0

    def read(self, path: Path) -> list[TrainingRow]:
        """Read rows of a text file, or of a .jsonl file of texts, prompts with completions, or messages.

        `ConfigError` names the file, the line and what is wrong with it.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--data {path}: cannot be read as UTF-8 text: {error}", param="data") from None
        if path.suffix != ".jsonl":
            return self.of_text(text)
        rows: list[TrainingRow] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                rows += self._of_line(line, f"--data {path}, line {number}")
        return rows

    def of_text(self, text: str) -> list[TrainingRow]:
        """Make rows of `length` tokens, each but the first of them learned; the last may be shorter."""
        tokens = self._tokenizer.encode(text)
        cuts = (tokens[at : at + self._length] for at in range(0, len(tokens), self._length))
        return [TrainingRow(cut) for cut in cuts if len(cut) > 1]

    def of_messages(self, messages: Sequence[Mapping[str, Any]], weight: float = 1.0) -> list[TrainingRow]:
        """Make a row for each message of the assistant, after those before it as the model's template has them."""
        if self._template is None:
            raise BadRequest("messages need a model with a chat template; give prompts and completions")
        rows = []
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") != "assistant" or i == 0:
                continue
            before = self._template.encode(messages[:i])
            whole = self._template.encode(messages[: i + 1], add_generation_prompt=False)
            if whole[: len(before)] != before or len(whole) == len(before):
                raise BadRequest("the chat template does not put an answer after what asks for it; use plain prompts")
            rows.append(TrainingRow(whole, len(before), weight))
        return self._fitted(rows)

    def of_answer(self, prompt: str, completion: str, weight: float = 1.0) -> list[TrainingRow]:
        """Make the row of a prompt and its answer: through the template where there is one, else text after text."""
        if self._template is not None:
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return self.of_messages(chat, weight)
        before = self._tokenizer.encode(prompt)
        answer = self._tokenizer.encode(completion, add_special_tokens=False)
        end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        return self._fitted([TrainingRow(before + answer + end, len(before), weight)])

    def _fitted(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        kept = []
        for row in rows:
            self.cut += len(row.tokens) > self._length
            if max(1, row.start) >= min(len(row.tokens), self._length):
                self.left_out += 1
            else:
                kept.append(TrainingRow(row.tokens[: self._length], row.start, row.weight))
        return kept

    def _of_line(self, line: str, where: str) -> list[TrainingRow]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: is not JSON ({error})", param="data") from None
        try:
            return list(self._of_entry(entry))
        except BadRequest as error:
            raise ConfigError(f"{where}: {error.message}", param="data") from None

    def _of_entry(self, entry: object) -> Iterator[TrainingRow]:
        if not isinstance(entry, dict):
            raise BadRequest(f"is not an object; {FORMS}")
        if isinstance(entry.get("text"), str):
            yield from self.of_text(entry["text"])
        elif isinstance(entry.get("messages"), list):
            yield from self.of_messages(entry["messages"])
        elif isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
            yield from self.of_answer(entry["prompt"], entry["completion"])
            rationale = entry.get("rationale")
            if self._rationales > 0 and isinstance(rationale, str) and rationale:
                yield from self.of_answer(RATIONALE_PREFIX + entry["prompt"], rationale, self._rationales)
        else:
            raise BadRequest(f"{FORMS}, has {', '.join(sorted(entry)) or 'nothing'}")
