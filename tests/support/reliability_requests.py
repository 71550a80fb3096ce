"""Requests of the reliability runs: honest ones, and bodies that nobody sane would send."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

from live_server import text_tools
from stub_engine import next_token

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 2, "logit_bias": {"5": 1.5}, "stop": ["x"], "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 1},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [5, 6]},
}
ODD: list[Any] = [None, True, 0, -1, 2**63, 10**30, -0.0, 1e308, "", "a" * 300, "\x00", [], [[]], [1, "a"], {},
                  {"a": {}}, {"type": "text", "text": "x"}, MESSAGES, [5, 6]]  # fmt: skip


def malformed(rng: random.Random) -> tuple[str, bytes]:
    """A good body with something broken in it."""
    path = rng.choice(list(GOOD))
    body = copy.deepcopy(GOOD[path])
    if rng.random() < 0.3:
        body[rng.choice(list(body))] = rng.choice(ODD)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 2:
                data[at : at + rng.randrange(1, 9)] = b""
            case 3:
                data[at:at] = rng.choice((b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"NaN", b"1e999", b'"\\ud800"'))
            case 4:
                data[at:at] = data[rng.randrange(len(data) + 1) :]
            case 5:
                data = bytearray(bytes(data).decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))))
            case 6 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
    return path, bytes(data)


FULL = bool(os.environ.get("QUIRE_RELIABILITY_FULL"))
ROOMY: dict[str, Any] = {"max_num_queued_reqs": 20_000, "num_blocks": 1 << 16}
MIB = 1 << 20


def alone(prompt: list[int], seed: int, count: int) -> str:
    """What the stub engine says to a prompt that runs alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, 0))
    return text_tools()[0].decode(tokens[len(prompt) :])


def asked(seed: int, count: int, **more: Any) -> dict[str, Any]:
    """A stream of `count` tokens."""
    return {"prompt": [8 + seed % 200, 9], "seed": seed, "max_tokens": count, "stream": True} | more
