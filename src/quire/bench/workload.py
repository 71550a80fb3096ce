"""What a benchmark asks for: prompts of random tokens and lengths of answers, the same for the same seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeVar

from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import EngineInfo
from quire.engine.requests import make_request

FIRST_TOKEN = 16
"""Random ids start here: the first ones are often special tokens."""


Number = TypeVar("Number", int, float)


def bounds(text: str, what: str, number: type[Number], least: Number, example: str) -> tuple[Number, Number]:
    """[low, high] of "3" or "1:3", as the option `what` has it; `ConfigError` beneath `least`, or for anything else."""
    first, _, last = text.partition(":")
    try:
        low, high = number(first), number(last or first)
    except ValueError:
        raise ConfigError(f"--{what} {text!r} is neither a number nor a range like {example}") from None
    if not least <= low <= high < math.inf:
        raise ConfigError(f"--{what} {text!r}: needs {least} <= low <= high")
    return low, high


@dataclass(frozen=True)
class Length:
    """A number of tokens, drawn uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, what: str) -> Length:
        """Parse "128" or "64:256"."""
        return cls(*bounds(text, what, int, 1, "64:256"))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Item:
    """One prompt and the number of tokens that are to follow it, whatever the model would like."""

    prompt: tuple[int, ...]
    output_tokens: int


def random_items(
    count: int, inputs: Length, outputs: Length, *, vocab_size: int, seed: int, shared_prefix: int = 0
) -> list[Item]:
    """`count` items of random token ids; the first `shared_prefix` tokens of every prompt are the same."""
    rng = random.Random(seed)
    first = min(FIRST_TOKEN, vocab_size - 1)
    prefix = tuple(rng.randrange(first, vocab_size) for _ in range(shared_prefix))
    items = []
    for _ in range(count):
        own = tuple(rng.randrange(first, vocab_size) for _ in range(inputs.draw(rng)))
        items.append(Item(prefix + own, outputs.draw(rng)))
    return items


def requests_of(items: list[Item], info: EngineInfo, name: str) -> list[Request]:
    """Engine requests that decode greedily to the full length; `ConfigError` when one does not fit the context."""
    requests = []
    for number, item in enumerate(items):
        total = len(item.prompt) + item.output_tokens
        if total > info.max_model_len:
            raise ConfigError(
                f"{len(item.prompt)} input and {item.output_tokens} output tokens make {total}, but the context holds "
                f"{info.max_model_len}; lower --input-len or --output-len"
            )
        params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, detokenize=False)
        requests.append(make_request(info, item.prompt, params, request_id=f"{name}-{number}", seed=number))
    return requests
