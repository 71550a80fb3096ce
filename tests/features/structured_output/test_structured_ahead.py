"""Structured output on a device that pretends, one step ahead: the masks and the tokens of the definitions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from queueing_engine import ROOMY, SHORT, build, joined, run
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.requests import with_grammar
from quire.text.tokenizer import Tokenizer
from tiny_model import write_tiny

SHAPES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,8}( [a-z]{2,8}){2}\\."},
    {"choice": ["yes", "no", "it depends"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    {"grammar": 'start: "(" start ")" | /[0-9]+/ ("+" | "-") /[0-9]+/'},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def requests(folder: Path, count: int, seed: int) -> list[Request]:
    """Half with a grammar."""
    draw, tokenizer, made = random.Random(seed), Tokenizer.from_folder(folder), []
    for i in range(count):
        shape = SHAPES[i // 2 % len(SHAPES)] if i % 2 else None
        params = SamplingParams(
            max_tokens=draw.choice((14, 20, 30)),
            temperature=draw.choice((0.0, 1.0, 1.5)),
            n=draw.choice((1, 1, 2)),
            logprobs=None if shape else 2,  # the device that pretends copies rows that are edited too early
            structured_outputs=shape,  # type: ignore[arg-type]
        )
        prompt = tuple(draw.randrange(4, 190) for _ in range(draw.randint(1, 25)))
        request = Request(id=f"r{i}", prompt=prompt, params=params, seed=i, arrival=0.0, eos_token_ids=(3,))
        made.append(with_grammar(260, tokenizer, request))
    return made


@pytest.mark.parametrize(("room", "eager"), [
    pytest.param(SHORT, "main", id="short-main"),
    pytest.param(ROOMY, "side", id="roomy-side"),
    pytest.param(SHORT, "side", id="short-side", marks=pytest.mark.slow),
    pytest.param(ROOMY, "main", id="roomy-main", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_step_ahead_gives_the_same_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, room: dict[str, int], eager: str
) -> None:
    plain = build(folder, monkeypatch, **ROOMY)
    late = build(folder, monkeypatch, eager, max_model_len=60, **room)
    asked = requests(folder, 20, 1)
    expected, _ = run(plain, asked, random.Random(1))
    found, ahead = run(late, asked, random.Random(2))
    assert found.keys() == expected.keys() and ahead > 10
    for key, outputs in found.items():
        *mine, numbers = joined(outputs)
        *theirs, wanted = joined(expected[key])
        assert mine == theirs, key
        assert numbers == pytest.approx(wanted, abs=1e-4), key
    assert late.scheduler.preemptions == 0 or room is SHORT
