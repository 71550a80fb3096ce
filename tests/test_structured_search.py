"""Short completions of grammars, byte by byte and in tokens."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.structured import StructuredOutputsParams
from quire.text.structured.completion_search import FIRST, LATER, byte_tokenizer, hints_of, shortest
from quire.text.structured.vocabulary import vocabulary_of
from shaped import PERSON, VOCAB, tokenizer
from test_structured import ready

COMPLETIONS = [
    ({"regex": "(ab)*c"}, b"c"),
    ({"regex": "a{100}|b"}, b"b"),
    ({"regex": "x{30}y|x{3}z"}, b"xxxz"),
    ({"regex": "[a-z]+@[a-z]+\\.com"}, b"a@a.com"),
    ({"json_object": True}, b"{}"),
    ({"json": {"type": "integer", "minimum": 1000}}, b"1000"),
    ({"json": {"type": "array", "minItems": 4, "items": {"type": "null"}}}, b"[null,null,null,null]"),
    ({"json": {"enum": ["a long one", "b", "another"]}}, b'"b"'),
    ({"choice": ["perhaps", "no"]}, b"no"),
]


@pytest.mark.parametrize(("shape", "text"), COMPLETIONS, ids=str)
def test_completions_are_short(shape: dict[str, Any], text: bytes) -> None:
    grammar, completion = ready(StructuredOutputsParams(**shape))
    found = b"".join(map(tokenizer().id_to_bytes, completion))
    assert len(found) == len(text) and (found == text or found.isdigit())
    matcher = grammar.matchers()[1]
    spelled = shortest(matcher, 256 + len(tokenizer().special), LATER)
    assert spelled is not None and len(spelled) == len(text)


def test_fewest_tokens() -> None:
    vocabulary = vocabulary_of(tokenizer(), VOCAB)
    for text in ("hello world", '{"a": [1, 2, 3]}', "größe \u20ac", ""):
        found = vocabulary.fewest(list(text.encode()))
        assert found is not None and tokenizer().decode(found) == text
        assert len(found) <= len(tokenizer().encode(text, add_special_tokens=False))


def test_the_byte_matcher_is_left_as_it_was() -> None:
    grammar, _ = ready(StructuredOutputsParams(json=PERSON))
    matcher = grammar.matchers()[1]
    assert matcher.consume_tokens(list(b'{"name": "x'))
    before = matcher.compute_bitmask()
    assert shortest(matcher, 256 + len(tokenizer().special), FIRST) is not None
    assert matcher.compute_bitmask() == before
    assert byte_tokenizer([]).vocab_size == 257


FREE = [
    (r'start: T "!"' + "\n" + r"T: /(.|\n)*/ & ~/(.|\n)*<\/end>(.|\n)*/" + "\n" + r'E: T "</end>"', b"!"),
    (r"start: E /[0-9]/" + "\n" + r"T: /(.|\n)*/ & ~/(.|\n)*<\/end>(.|\n)*/" + "\n" + r'E: T "</end>"', b"</end>1"),
    (r"start: T <|end|>" + "\n" + r"T: /(.|\n)*/", b"<|end|>"),
]


@pytest.mark.parametrize(("lark", "text"), FREE, ids=["!", "text", "token"])
def test_free_text_ends_by_what_the_grammar_writes_out(lark: str, text: bytes) -> None:
    grammar, completion = ready(StructuredOutputsParams(grammar=lark))
    assert b"".join(map(tokenizer().id_to_bytes, completion)) == text
    assert set(grammar.hints) <= {b"</end>", b"!"}


def test_hints_are_texts_of_terminals_first() -> None:
    assert hints_of('start: "a" T\nT: /x/ "b\\n"\nr: %json {"type": "string"}') == (b"b\n", b"a")
    assert hints_of('{"grammars": [{"json_schema": {"const": "a"}}]}') == ()
