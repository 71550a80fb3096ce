"""Dialogue that a chat model writes itself: two questions a conversation, answered at temperature 0.8, seeded.

    python -m benchmarks.common.dialogue MODEL OUT.jsonl             conversations to learn from
    python -m benchmarks.common.dialogue MODEL OUT.jsonl --held-out  of topics that the former have none of

A line of OUT.jsonl is {"messages": [...]}. Questions are made of templates, so that they carry no licence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import parser_of
from quire.core.params import SamplingParams
from quire.engine.llm import LLM

Conversation = list[dict[str, str]]
TOPICS = (
    "bread", "bicycles", "the moon", "spreadsheets", "houseplants", "chess", "rivers", "budgets", "volcanoes", "sleep",
    "maps", "bees", "job interviews", "coffee", "black holes", "photography", "recycling", "the violin", "vaccines",
    "Python functions", "glaciers", "running", "email", "the Roman Empire", "solar panels", "cats", "fractions",
    "public speaking", "tides", "knitting", "electric cars", "dinosaurs", "tea", "compilers", "friendship", "bridges",
    "rain", "passwords", "gardening", "the human heart",
)  # fmt: skip
ASKS = (
    ("Explain {} to a ten-year-old.", "Can you say that in one sentence?"),
    ("What are three common mistakes that people make with {}?", "How can I avoid the first one?"),
    ("Write a short story about {}.", "Give the story another ending."),
    ("List five facts about {}.", "Which of them surprises people most, and why?"),
    ("I know nothing about {}. Where should I start?", "What should I do after that?"),
    ("What is the history of {}?", "What may change in the next fifty years?"),
    ("Compare {} with something similar.", "Put the main differences into a list."),
    ("Write a polite email to a friend about {}.", "Make it shorter."),
)
HELD_OUT = 8
"""Every so many topics one is not learned from."""


def questions(held_out: bool) -> list[tuple[str, str]]:
    """Both questions of each conversation, of the topics that are learned from, or of the others."""
    topics = [topic for i, topic in enumerate(TOPICS) if (i % HELD_OUT == HELD_OUT - 1) == held_out]
    return [(first.format(topic), then) for topic in topics for first, then in ASKS]


def conversations(llm: LLM, asked: Sequence[tuple[str, str]], tokens: int) -> list[Conversation]:
    """Let the model answer, with at most `tokens` tokens each time."""
    told: list[Conversation] = [[] for _ in asked]
    for turn in range(2):
        for said, pair in zip(told, asked, strict=True):
            said.append({"role": "user", "content": pair[turn]})
        params = [
            SamplingParams(max_tokens=tokens, temperature=0.8, seed=2 * i + turn) for i in range(len(asked))
        ]  # fmt: skip
        for said, answer in zip(told, llm.chat(told, params), strict=True):
            said.append({"role": "assistant", "content": answer.outputs[0].text.strip()})
    return told


def main() -> None:
    """Write a file of conversations."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer at most")
    args = parser.parse_args()
    told = conversations(LLM(args.model), questions(args.held_out), args.tokens)
    args.out.write_text("".join(json.dumps({"messages": said}) + "\n" for said in told))


if __name__ == "__main__":
    sys.exit(main())
