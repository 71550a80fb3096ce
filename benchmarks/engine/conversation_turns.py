"""Prompt tokens that quire's server and llama.cpp's compute anew in each turn, over one GGUF file.

    python -m benchmarks.engine.conversation_turns --model FILE.gguf
    python -m benchmarks.engine.conversation_turns --model FILE.gguf --engines quire --turns 8

FILE is one of those that the suite hybrids.toml makes: each word of its vocabulary is the number of a token. The peer
is in the environment that `quire bench suite --make-peers` makes below `--work`.

    conversation  a prompt is all that was said and a new question
    drafts        the same prompts while n-grams draft; `changed` counts answers that are not those of `conversation`
    first line    the same text after a first line that is another each time, and longer by 100 tokens
    later line    the same with a system prompt of 1,000 tokens before that line

`shared` are the prompt's tokens that the server has seen at the same places, `anew` those that it computed, and `hits`
the share of `shared` that it did not compute. Each case has servers of its own, one request at a time, greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.results import parser_of
from quire.bench.http import Client
from quire.bench.suite.environments import existing
from quire.bench.suite.servers import server
from quire.core.errors import ConfigError

LENGTH = 8192
WORDS = range(16, 32000)
SYSTEM, QUESTION, SHIFT, TEXT, PROMPTS = 1000, 60, 100, 2000, 6


@dataclass
class Asked:
    """A server, and all token sequences that it has computed: prompts and their answers.

    `rows`: of each request the tokens of its prompt, shared with what was computed, and computed anew.
    """

    url: str
    output: int
    seen: list[list[int]] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def answer(self, prompt: list[int]) -> list[int]:
        """Ask for an answer and note what it took."""
        found = asyncio.run(self._ask(prompt))
        text = found["choices"][0]["text"]
        tokens = [int(word) for word in text.split() if word.isdigit()]
        cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        shared = max((common(prompt, other) for other in self.seen), default=0)
        self.rows.append((len(prompt), min(shared, len(prompt) - 1), len(prompt) - cached))
        self.seen.append(prompt + tokens)
        return tokens

    async def _ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": self.output, "temperature": 0, "ignore_eos": True}
        async with Client(self.url) as client:
            model = (await client.get("/v1/models"))["data"][0]["id"]
            found: dict[str, Any] = await client.post("/v1/completions", body | {"model": model})
            return found

    def told(self) -> dict[str, Any]:
        """Figures of all requests."""
        shared = sum(row[1] for row in self.rows)
        kept = sum(min(prompt - anew, same) for prompt, same, anew in self.rows)
        return {
            "prompt": [row[0] for row in self.rows],
            "shared": [row[1] for row in self.rows],
            "anew": [row[2] for row in self.rows],
            "hits": round(kept / shared, 4) if shared else None,
        }


def common(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def words(count: int, seed: str) -> list[int]:
    """Made-up text, the same for one seed."""
    rng = random.Random(seed)
    return [rng.choice(WORDS) for _ in range(count)]


@contextmanager
def serving(engine: str, args: argparse.Namespace, drafts: bool) -> Iterator[str]:
    """URL of a server over the model, with its prefix cache as it comes, one sequence at a time."""
    variables: dict[str, str] = {}
    if engine == "quire":
        command = [sys.executable, "-m", "quire", "serve", "--model", args.model, "--max-model-len", str(LENGTH)]
        command += ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(2 << 30)]
        command += ["--speculative-config", json.dumps({"method": "ngram"})] if drafts else []
    else:
        peer = existing(args.work, "llama")
        if peer is None:
            raise ConfigError(f"there is no environment {args.work / 'llama'}; make it with `quire bench suite`")
        variables = peer.variables
        command = [str(peer.folder / "build" / "bin" / "llama-server"), "--model", args.model, "--no-webui"]
        command += ["--parallel", "1", "--ctx-size", str(LENGTH)]
        command += ["--spec-type", "ngram-simple"] if drafts else []
    with server(command, variables, args.work / f"turns-{engine}.log") as found:
        yield found.url


def conversation(asked: Asked, args: argparse.Namespace) -> list[list[int]]:
    """All prompts of a conversation, each with the answers before it."""
    said, prompts = words(SYSTEM, "system"), []
    for turn in range(args.turns):
        said = said + words(QUESTION, f"question {turn}")
        prompts.append(said)
        said = said + asked.answer(said)
    return prompts


def lines(asked: Asked, head: int) -> None:
    """Prompts of one text behind a line that changes and grows."""
    for number in range(PROMPTS):
        line = words(SHIFT * (1 + number), f"line {number}")
        asked.answer(words(head, "system") + line + words(TEXT, "text"))


def measured(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every case on one engine."""
    found: dict[str, Any] = {}

    def case(name: str, drafts: bool, run: Callable[[Asked], Any]) -> tuple[Asked, Any]:
        with serving(engine, args, drafts) as url:
            asked = Asked(url, args.output)
            given = run(asked)
        found[name] = asked.told()
        print(engine, name, json.dumps(found[name]), flush=True)
        return asked, given

    plain, prompts = case("conversation", False, lambda asked: conversation(asked, args))
    drafted, _ = case("drafts", True, lambda asked: [asked.answer(prompt) for prompt in prompts])
    found["drafts"]["changed"] = sum(a != b for a, b in zip(plain.seen, drafted.seen, strict=True))
    print(engine, "drafts, changed answers:", found["drafts"]["changed"], flush=True)
    case("first line", False, lambda asked: lines(asked, 0))
    case("later line", False, lambda asked: lines(asked, SYSTEM))
    return found


def main() -> None:
    """Measure the engines that were asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--engines", nargs="+", choices=("quire", "llama.cpp"), default=["quire", "llama.cpp"])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    args = parser.parse_args()
    for engine in args.engines:
        measured(engine, args)


if __name__ == "__main__":
    main()
