"""JSON schemas as people's tools write them: each is answered, and the answer is valid by it or said to be not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from often import one_of
from quire.core.errors import BadRequest
from quire.core.structured import StructuredOutputsParams
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import Grammar, GrammarGuide
from quire.text.structured.vocabulary import vocabulary_of
from schema_models import all_models
from shaped import VOCAB, tokenizer
from test_structured import END, wander

PARTLY = frozenset({
    "pydantic-set", "pydantic-set_int", "pydantic-set_many", "pydantic-frozenset", "pydantic-conset",
    "pydantic-unique", "pydantic-contains", "pydantic-Event", "dataclass-Tags", "zod3-set",
    "zod3-backReference", "zod3-boundary", "zod4-backReference", "zod4-boundary", "zod4-duration",
    "zod4-isoDuration", "zod4-float32", "openapi-Shape", "openapi-Emails", "openapi-Few", "openapi-Winners",
    "openapi-Float32",
})  # fmt: skip
"""Of which a grammar holds a part, and the rest is checked."""
NO_PYTHON = frozenset({"zod3-emoji", "zod4-emoji"})
"""Patterns that Python's regular expressions cannot read; the grammar reads them."""
CHECKED = jsonschema.FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))


def answers(schema: dict[str, Any], seed: int, **more: Any) -> list[str]:
    """What a model that knows nothing says of a schema, with hardly room enough and with plenty."""
    draw, vocabulary = random.Random(seed), vocabulary_of(tokenizer(), VOCAB)
    read = READER.read(StructuredOutputsParams(json=schema, **more), (END,), vocabulary)
    grammar, found = Grammar(read.grammar, vocabulary), []
    for room in (draw.choice((0, 1, 3)), 40):
        most = len(read.completion) + room
        guide = GrammarGuide(grammar, most, (END,), read.completion)
        said = wander(guide, most, np.random.default_rng(seed + room), VOCAB)
        found.append(b"".join(map(tokenizer().id_to_bytes, said)).decode())
    return found


def valid(text: str, schema: dict[str, Any]) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=CHECKED).is_valid(json.loads(text)))


def errors(schema: dict[str, Any], text: str) -> list[Any]:
    from quire.text.structured.answer_checks import AnswerChecks

    return AnswerChecks(schema).errors(text)


@pytest.mark.parametrize(
    ("name", "schema"), one_of(11, all_models()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_model_is_answered_and_the_answer_is_valid_or_said_to_be_not(name: str, schema: dict[str, Any]) -> None:
    for text in answers(schema, len(name)):
        if name in NO_PYTHON:
            assert re.search('"[^"]+"', text) and not errors(schema, text)
            continue
        assert bool(errors(schema, text)) != valid(text, schema), text
        assert name in PARTLY or valid(text, schema), text


def test_there_are_many_models_of_all_tools() -> None:
    names = [name for name, _ in all_models()]
    assert len(names) == len(set(names)) >= 400
    assert {name.split("-")[0] for name in names} == {"pydantic", "dataclass", "zod3", "zod4", "openapi"}


@pytest.mark.slow
def test_what_is_held_in_part_is_refused_by_strict_and_nothing_else() -> None:
    vocabulary = vocabulary_of(tokenizer(), VOCAB)
    for name, schema in all_models():
        try:
            READER.read(StructuredOutputsParams(json=schema, strict=True), (END,), vocabulary)
        except BadRequest as error:
            assert name in PARTLY and "strict refuses it" in str(error)
        else:
            assert name not in PARTLY
