"""How good a model is: exact answers to its question set, and perplexity on text it was not trained on.

perplexity = exp(mean negative log-likelihood of a token); bits per byte = total negative log-likelihood / ln 2 / bytes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError, ModelError
from quire.core.params import SamplingParams
from quire.core.progress import counting_bar
from quire.core.request import longest_prompt
from quire.engine.llm import LLM

MISSES_SHOWN = 3
TEXT = Path(__file__).resolve().parents[1] / "assets" / "text"
"""Text of several domains and languages, for calibration and to measure on."""


class Question(msgspec.Struct, frozen=True):
    """One row of questions.jsonl."""

    name: str
    question: str
    answer: str


@dataclass(frozen=True)
class Window:
    """The tokens `start..stop` of a text, of which those before `scored` are context only."""

    start: int
    stop: int
    scored: int


def windows(length: int, size: int) -> Iterator[Window]:
    """Cover `length` tokens by windows of at most `size`, each token but the first scored once, with at least half a
    window of context where there is that much text before it."""
    stride, scored = max(1, size // 2), 1
    for start in range(0, length, stride):
        stop = min(start + size, length)
        if stop <= scored:
            return
        yield Window(start, stop, scored)
        scored = stop


@dataclass
class TextScore:
    """How well a text was predicted: its UTF-8 bytes, the tokens that were scored, and their negative log-likelihood
    in nats."""

    size: int
    tokens: int = 0
    nll: float = 0.0


def perplexity(llm: LLM, texts: Mapping[str, str]) -> dict[str, float]:
    """Score `texts` with a sliding window of the model's context."""
    return score_texts(llm, texts)[0]


def score_texts(llm: LLM, texts: Mapping[str, str]) -> tuple[dict[str, float], dict[str, TextScore]]:
    """Score `texts` as `perplexity` does; the figures of all together, and the score of each."""
    tokenizer = llm.get_tokenizer()
    size = longest_prompt(llm.info.max_model_len)
    rows = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
    cut = [(name, ids, w) for name, ids in rows.items() for w in windows(len(ids), size)]
    jobs = [(ids[w.start : w.stop], w.scored - w.start) for _, ids, w in cut]
    each = {name: TextScore(len(text.encode())) for name, text in texts.items()}
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    total, tokens = 0.0, 0
    with counting_bar(len(jobs), "windows") as count:
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        for delta in llm.stream(prompts, params):
            if delta.output is None:
                continue
            ids, first = jobs[delta.prompt]
            entries = (delta.output.prompt_logprobs or [])[first:]
            scores = [entry[t].logprob for t, entry in zip(ids[first:], entries, strict=True) if entry is not None]
            total -= math.fsum(scores)
            tokens += len(scores)
            own = each[cut[delta.prompt][0]]
            own.nll, own.tokens = own.nll - math.fsum(scores), own.tokens + len(scores)
            count()
    if tokens == 0:
        raise ConfigError("there is no text to score: two tokens are needed at least")
    size_bytes = sum(score.size for score in each.values())
    figures = {
        "texts": len(texts),
        "tokens": tokens,
        "bytes": size_bytes,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": total / math.log(2) / size_bytes,
    }
    return figures, each


def read_questions(folder: Path) -> list[Question]:
    """The question set beside the model's weights."""
    decode = msgspec.json.Decoder(Question).decode
    return [decode(line) for line in (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


def heldout_texts(folder: Path) -> dict[str, str]:
    """Sources of the standard library's modules that heldout.json names; they are read, not imported."""
    texts = {}
    for name in msgspec.json.decode((folder / "heldout.json").read_bytes())["modules"]:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModelError(f"heldout.json names module {name!r}, which this Python does not have")
        texts[name] = Path(spec.origin).read_text(encoding="utf-8")
    return texts


def shipped(file: str) -> list[tuple[str, str]]:
    """(name, text) of each line of a file of the text that comes with quire; its README says where it is from."""
    rows = map(msgspec.json.decode, (TEXT / file).read_bytes().splitlines())
    return [(row["name"], row["text"]) for row in rows]


def general_heldout() -> dict[str, str]:
    """The shipped text that no calibration looks at, by domain."""
    return dict(shipped("heldout.jsonl"))


def exact_answers(llm: LLM, questions: Sequence[Question]) -> dict[str, Any]:
    """Ask every question through the chat template, greedily; an answer is right if it is the same text."""
    params = SamplingParams(temperature=0.0, max_tokens=128)
    prompts = [llm.chat_template.encode([{"role": "user", "content": q.question}]) for q in questions]
    right, misses = 0, []
    with counting_bar(len(questions), "questions") as count:
        for delta in llm.stream([{"prompt_token_ids": p} for p in prompts], params):
            if delta.output is None:
                continue
            asked, answer = questions[delta.prompt], delta.output.outputs[0].text
            right += answer == asked.answer
            if answer != asked.answer:
                misses.append({"question": asked.question, "expected": asked.answer, "answer": answer})
            count()
    total = len(questions)
    return {"right": right, "total": total, "percent": 100 * right / total, "misses": misses[:MISSES_SHOWN]}
