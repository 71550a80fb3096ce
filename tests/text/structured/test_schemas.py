"""Schemas as a grammar holds them: what is rewritten, what is left to checking, what is refused and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.core.structured import StructuredOutputsParams
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import Grammar
from quire.text.structured.vocabulary import vocabulary_of
from shaped import VOCAB, tokenizer
from structured_requests import END

Schema = dict[str, Any]


def takes(schema: Schema, *texts: str, **more: Any) -> list[bool]:
    """Whether the grammar of a schema takes each text whole."""
    vocabulary = vocabulary_of(tokenizer(), VOCAB)
    read = READER.read(StructuredOutputsParams(json=schema, **more), (END,), vocabulary)
    matcher, found = Grammar(read.grammar, vocabulary).matchers()[1], []
    end = 256 + len(vocabulary.special)
    for text in texts:
        said = [*text.encode(), end]
        found.append(matcher.validate_tokens(said) == len(said))
    return found


def closed(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


A, B = {"type": "integer"}, {"type": "string"}
TAGGED = {"oneOf": [closed(k={"const": "a", "default": "a"}, n=A), closed(k={"const": "b", "default": "b"}, n=B)]}
HELD: list[tuple[Schema, list[str], list[str]]] = [
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
     ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"0000-01-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"'], ['"2023-02-29T00:00:00Z"']),
    ({"type": "object", "properties": {"a": A}}, ['{"a":1}', '{"b":"x"}', '{"a":1,"ab":2}'], ['{"\\u0061":"x"}']),
    ({"type": "object", "properties": {"a": A}, "additionalProperties": B}, ['{"a":1}', '{"b":"x"}', '{"aa":""}'],
     ['{"\\u0061":"x"}', '{"b":1}']),
    ({"type": "array", "items": {"enum": [1, "x"]}, "uniqueItems": True}, ["[]", "[1]", '["x",1]', '[1,"x"]'],
     ["[1,1]", '["x",1,"x"]']),
    ({"type": "array", "items": B, "uniqueItems": True, "maxItems": 1}, ["[]", '["a"]'], ['["a","b"]']),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A}, ["{}", '{"a":1,"b":2}'],
     ['{"c":1}', '{"a":""}']),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xa":1}'], ['{"a":1}']),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": A}, ['{"ab":1}'], ['{"abc":1}']),
    ({"type": "object", "propertyNames": {"format": "date"}}, ['{"2024-02-29":1}'], ['{"2023-02-29":1}']),
    ({**closed(a=A, b=A), "dependentRequired": {"a": ["b"]}}, ["{}", '{"b":1}', '{"a":1,"b":2}'], ['{"a":1}']),
    ({**closed(a=A, b=A), "dependencies": {"a": ["b"]}}, ["{}", '{"b":1}', '{"a":1,"b":2}'], ['{"a":1}']),
    ({**closed(a=A, b=A), "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"b":1}', '{"a":1,"b":2}'], ['{"a":1}']),
    ({**closed(k={"enum": ["x", "y"]}, n=A), "required": ["k"], "if": {"properties": {"k": {"const": "x"}}},
      "then": {"required": ["n"]}}, ['{"k":"y"}', '{"k":"x","n":1}', '{"k":"y","n":1}'], ['{"k":"x"}']),
    (TAGGED, ['{"k":"a"}', '{"k":"a","n":1}', '{"k":"b","n":""}'], ['{"k":"a","n":""}', "{}", '{"n":1}']),
    ({**TAGGED, "discriminator": {"propertyName": "k"}}, ['{"k":"b","n":""}'], ["{}"]),
    ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9]).{3,5}$"}, ['"aA1"', '"1A.."'],
     ['"aA"', '"abc"', '"aA1xyz"']),
    ({"type": "string", "pattern": "^(?!-)[a-z-]+$"}, ['"a-"'], ['"-a"']),
    ({"type": "string", "pattern": "^(?!(?:root|admin)$)[a-z]+$"}, ['"roo"', '"rooty"', '"x"'], ['"root"', '"admin"']),
    ({"type": "string", "pattern": "^(?!.*--)[a-z-]+$"}, ['"a-b-c"'], ['"a--b"']),
    ({"type": "string", "pattern": "^(?!.*ab)[a-c]+$"}, ['"aacb"', '"ba"'], ['"ab"', '"caab"']),
    ({"type": "string", "pattern": "^(?!\\s*$).+"}, ['"a"'], ['"  "']),
    ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
    ({"type": ["string", "integer"], "not": {"type": "string"}}, ["1"], ['"a"']),
    ({"type": "string", "not": {"enum": ["", "a"]}}, ['"b"', '"ab"'], ['"a"', '""']),
    ({"enum": [1, 2, 3], "not": {"const": 2}}, ["1", "3"], ["2"]),
    ({"not": {"not": A}}, ["1"], ['"a"']),
    (closed(a=A, b={"not": {}}), ['{"a":1}', "{}"], ['{"b":1}']),
    ({"type": "array", "items": A, "contains": {}, "minContains": 2, "maxContains": 3}, ["[1,2]"],
     ["[1]", "[1,2,3,4]"]),
    ({"type": "array", "items": A, "contains": {"const": 1}, "minContains": 0}, ["[]", "[2]"], ['["a"]']),
    ({"allOf": [{"type": "object", "properties": {"a": A}}, {"properties": {"b": B}}], "unevaluatedProperties": False},
     ['{"a":1,"b":""}'], ['{"c":1}', '{"a":""}']),
    ({"type": "object", "properties": {"a": A}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 2, "exclusiveMaximum": False},
     ["1", "2"], ["0"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), HELD, ids=lambda value: json.dumps(value)[:60])
def test_a_grammar_holds_it_and_strict_takes_it(schema: Schema, yes: list[str], no: list[str]) -> None:
    assert takes(schema, *yes, *no, strict=True) == [True] * len(yes) + [False] * len(no)


def test_references_of_all_kinds() -> None:
    node: Schema = {"type": "object", "properties": {"v": A, "n": {"$ref": "#"}}, "additionalProperties": False}
    assert takes(node, '{"v":1,"n":{"n":{}}}', '{"n":1}') == [True, False]
    within = {"components": {"schemas": {"A/B": {**A, "format": "int32"}}}, "$ref": "#/components/schemas/A~1B"}
    assert takes(within, "1", '""') == [True, False]
    twice = {"$ref": "#/definitions/x", "definitions": {"x": {"items": {"$ref": "#/$defs/x"}, "type": "array"}},
             "$defs": {"x": {"type": "null"}}}  # fmt: skip
    assert takes(twice, "[null]", "[[]]") == [True, False]
    again = {"$defs": {"l": closed(k={"const": "l"}), "s": closed(k={"const": "s"}, p={"$ref": "#/$defs/e"}),
                       "e": {"oneOf": [{"$ref": "#/$defs/l"}, {"$ref": "#/$defs/s"}]}},
             "$ref": "#/$defs/e"}  # fmt: skip
    assert takes(again, '{"k":"s","p":{"k":"l"}}', '{"k":"s","p":{}}', strict=True) == [True, False]


NESTED: Any = A
for _ in range(120):
    NESTED = {"type": "array", "items": NESTED}
REFUSED: list[tuple[Any, str]] = [
    (closed(a=closed(b={"type": "x"})), "property 'a.b': Invalid type: x"),
    ({**closed(a={"not": {}}), "required": ["a"]}, "property 'a': no value is allowed"),
    (closed(a={"type": "array", "items": {"pattern": "("}}), "property 'a.[]': pattern '(' is no regular expression"),
    (closed(a={"$ref": "#/$defs/x"}), "property 'a': $ref '#/$defs/x' points at nothing"),
    (closed(a={"$ref": "http://x.org/y"}), "$ref names another document, and none is fetched"),
    ({**closed(a={"enum": ["a"], "pattern": "b"}), "required": ["a"]}, "property 'a': no text has all that is asked"),
    (closed(a={"enum": list(range(5000))}), "property 'a': enum has more than 4096 values"),
    ({"anyOf": [{}] * 10_001}, "more than 10000 parts"),
    (NESTED, "nested more than 100 deep"),
]


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_what_is_refused_has_its_place_in_plain_words(schema: Schema, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        takes(schema)
    assert says in caught.value.message and len(caught.value.message) < 300
    assert not any(sign in caught.value.message for sign in ("Regex", "And (", "lark", "x-quire"))


def test_many_ways_that_are_told_apart_are_not_counted_twice() -> None:
    """50 objects of 20 properties, each two of which are compared, are 1,050 parts."""
    ways = [{**closed(**{f"p{i}_{j}": A for j in range(20)}), "required": [f"p{i}_0"]} for i in range(50)]
    assert takes({"oneOf": ways}, '{"p7_0":1}', '{"p7_1":1}', strict=True) == [True, False]


def test_widened_ways_and_their_strict_refusals() -> None:
    loose: list[tuple[Schema, str]] = [
        ({"type": "array", "items": B, "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "number"}, A]}, "oneOf, of which two may fit"),
        (closed(a={"type": "string", "pattern": "^(a)\\1$"}), "property 'a': pattern"),
        ({"type": "array", "contains": A}, "contains"),
        ({"type": "string", "pattern": "^(?!one|two$)[a-z]+$"}, "pattern"),
    ]
    for schema, says in loose:
        takes(schema)
        with pytest.raises(BadRequest, match="strict refuses it") as caught:
            takes(schema, strict=True)
        assert says in caught.value.message


def errors(schema: Schema, text: str) -> list[tuple[str, str]]:
    from quire.text.structured.answer_checks import AnswerChecks

    return [(error.path, error.message) for error in AnswerChecks(schema).errors(text)]


def test_a_hostile_schema_hurts_no_check() -> None:
    """Each is said not to be checked, and the next one is."""
    hostile: list[tuple[Schema, str]] = [
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 40 + "b")),
        ({"$ref": "#"}, "1"),
        ({"$ref": "http://127.0.0.1:1/x"}, "1"),
        ({"$ref": "file:///etc/passwd"}, "1"),
    ]
    for schema, text in hostile:
        [(_, message)] = errors(schema, text)
        assert message.startswith("not checked: ")
    assert errors(hostile[0][0], '"a"')[0][1].endswith("s of CPU time before"), "the second costs nothing"
    assert errors(A, '"a"') == [("", "'a' is not of type 'integer'")]
    assert errors(A, "[" * 90_000)[0][1].startswith("it is not JSON")
    assert errors(
        {"items": {"type": "object", "properties": {"a/b": {"format": "date"}}}}, '[{"a/b":"2023-02-29"}]'
    ) == [("/0/a~1b", "'2023-02-29' is not a 'date'")]
    assert errors({"properties": {"a": A}}, '{"a":1,"\\u0061":"x"}') == [("", "an object has the name 'a' twice")]
