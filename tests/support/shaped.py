"""Requests whose answers have a shape, as an engine takes them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from paths import PYDOC
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.requests import with_grammar
from quire.text.tokenizer import Tokenizer

VOCAB = 6144
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "a longer one"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"json": PERSON},
    {"json_object": True},
    {"regex": "[a-z]{2,8}( [a-z]{2,8}){3}\\."},
    {"choice": ["yes", "no", "it depends on how you look at it"]},
    {"grammar": 'start: "(" start ")" | /[0-9]+/ ("+" | "-") /[0-9]+/'},
)
SHAPELESS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "stop": "}"}, "stop"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2, "max_tokens": 9}, "min_tokens"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a{50}"}, "max_tokens": 3}, "max_tokens"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"guided_json": {"type": "x"}}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": "start: b"}, "guided_grammar"),
    ({"grammar": "start: b"}, "grammar"),
    ({"json_schema": {"type": "x"}}, "json_schema"),
    ({"grammar": 'root ::= "a"', "json_schema": {"type": "string"}}, "grammar"),
    ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "null"}}, "grammar": 'root ::= "a"'}, "grammar"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
)
"""Fields of bodies that ask for what is no shape, or for one that cannot be had, and the field that the error names."""


@cache
def tokenizer() -> Tokenizer:
    """That of the embedded model."""
    return Tokenizer.from_folder(PYDOC)


def needed(shape: StructuredOutputsParams) -> int:
    """Tokens that the shortest answer takes; `BadRequest` where there is none."""
    params = SamplingParams(structured_outputs=shape, max_tokens=None)
    return len(shaped(Request(id="", prompt=(5,), params=params, seed=0, arrival=0.0)).completion)


def shaped(request: Request) -> Request:
    """`request` with the grammar of its structured outputs, for the embedded model."""
    return with_grammar(VOCAB, tokenizer(), request)


def shaped_requests(count: int, seed: int = 3, **more: Any) -> list[Request]:
    """Some with every shape, hot and cold, with hardly room enough and with plenty."""
    draw, made = random.Random(seed), []
    for i in range(count):
        shape = StructuredOutputsParams(**SHAPES[i % len(SHAPES)])
        stem = [draw.randrange(8, VOCAB) for _ in range(draw.choice((3, 9, 17)))]
        params = SamplingParams(
            structured_outputs=shape,
            max_tokens=needed(shape) + draw.choice((0, 1, 2, 5, 30)),
            temperature=draw.choice((0.0, 1.0, 1.5)),
            n=draw.choice((1, 1, 2)),
            logprobs=2,
        )
        prompt = tuple((stem * 12)[: draw.choice((1, 20, 40))])
        request = Request(id=f"s{i}", prompt=prompt, params=params, seed=i, arrival=0.0, eos_token_ids=(4,), **more)
        made.append(shaped(request))
    return made
