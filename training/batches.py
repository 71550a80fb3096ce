"""Turns texts and questions into the token batches of the two phases."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from data import Question, question_forms
from tokenizer import END_OF_TEXT, answer_text, prompt_text, token_id

BLOCK = 1024
BLOCKS_PER_BATCH = 4
ROW_LENGTHS = (256, 256, 512, 1024)
QUESTION_BATCH_TOKENS = 2400
SECOND_TURN_SHARE = 0.08
IGNORED = -100


class CodeBlocks:
    """The code texts as blocks of tokens, visited in a new order on every pass."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        self.seed = seed
        end = token_id(tokenizer, END_OF_TEXT)
        texts = random.Random(seed).sample(texts, len(texts))
        stream: list[int] = []
        for encoding in tokenizer.encode_batch_fast(texts):
            stream += encoding.ids
            stream.append(end)
        self.blocks = torch.tensor(stream[: len(stream) // BLOCK * BLOCK], dtype=torch.int32).view(-1, BLOCK)

    def batch(self, first: int, count: int, row_length: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of `count` blocks, the first being the run's `first`-th."""
        chosen = [self._block(index) for index in range(first, first + count)]
        rows = torch.stack(chosen).long().view(-1, row_length)
        targets = torch.full_like(rows, IGNORED)
        targets[:, :-1] = rows[:, 1:]
        return rows, targets

    def _block(self, index: int) -> Tensor:
        turn, offset = divmod(index, len(self.blocks))
        order = random.Random(self.seed + turn).sample(range(len(self.blocks)), len(self.blocks))
        return self.blocks[order[offset]]


@dataclass(frozen=True)
class Row:
    """One question in one form: the prompt's tokens and the answer's."""

    name: str
    prompt: list[int]
    answer: list[int]


def encode_question(tokenizer: Tokenizer, name: str, question: str, answer: str) -> Row:
    """Encode a question exactly as the chat template presents it."""
    prompt = tokenizer.encode(prompt_text(question), add_special_tokens=False).ids
    return Row(name, prompt, tokenizer.encode(answer_text(answer), add_special_tokens=False).ids)


def fixed_rows(tokenizer: Tokenizer, questions: list[Question]) -> list[Row]:
    """Return every question in the one form that the checks use."""
    return [encode_question(tokenizer, row.name, row.question, row.answer) for row in questions]


def all_rows(tokenizer: Tokenizer, questions: list[Question]) -> list[list[Row]]:
    """Return, for every question, a row for each of its forms."""
    return [
        [encode_question(tokenizer, row.name, form, row.answer) for form in question_forms(row.name)]
        for row in questions
    ]


def padded(turns: list[list[Row]]) -> tuple[Tensor, Tensor]:
    """Pad conversations on the right; only answers are targets."""
    length = max(sum(len(row.prompt) + len(row.answer) for row in rows) for rows in turns) - 1
    tokens = torch.zeros(len(turns), length, dtype=torch.long)
    targets = torch.full((len(turns), length), IGNORED)
    for index, rows in enumerate(turns):
        ids: list[int] = []
        wanted: list[int] = []
        for row in rows:
            ids += row.prompt + row.answer
            wanted += [IGNORED] * len(row.prompt) + row.answer
        tokens[index, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[index, : len(ids) - 1] = torch.tensor(wanted[1:])
    return tokens, targets


def question_batches(rows: list[list[Row]], wrong: set[str], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one pass over the questions, those answered wrongly three times, in batches of similar length."""
    rng = random.Random(seed)
    picked = [forms for forms in rows for _ in range(3 if forms[0].name in wrong else 1)]
    turns = [[rng.choice(forms)] for forms in picked]
    for conversation in turns:
        if rng.random() < SECOND_TURN_SHARE:
            conversation.insert(0, rng.choice(rng.choice(rows)))
    lengths = {id(rows): sum(len(row.prompt) + len(row.answer) for row in rows) for rows in turns}
    turns.sort(key=lambda rows: lengths[id(rows)] + 3 * rng.random())
    batches: list[list[list[Row]]] = [[]]
    for conversation in turns:
        if (len(batches[-1]) + 1) * (lengths[id(conversation)] + 2) > QUESTION_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(conversation)
    rng.shuffle(batches)
    for batch in batches:
        yield padded(batch)
