"""What is asked for -> one grammar as llguidance takes it. The process that checks grammars runs this."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from quire.core.structured import renamed_reference
from quire.text.structured.schemas.blame import blame, plain
from quire.text.structured.schemas.normalize import normalized
from quire.text.structured.schemas.work import MARK, NotOffered, error_of

__all__ = ["LARK", "NotOffered", "explained", "grammar_of", "within"]
LARK = "%llguidance {}\n"
"""What grammars begin with that are Lark for certain; others are looked at, as they may be GBNF."""


def grammar_of(kind: str, value: Any, options: Mapping[str, Any], special: Collection[str]) -> str:
    """The grammar of `value`, which is a `kind` of `quire.core.structured`; `NotOffered` when it is none.

    `options`: about spaces and names of JSON. `special`: tokens of the model that no text spells.
    """
    if kind == "json_object":
        return _json(_schema({"type": "object"}, options), options)
    if kind == "json":
        return _json(_schema(value, options), options)
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
    if kind == "grammar":
        if value.startswith(LARK):
            return str(LLMatcher.grammar_from_lark(_lark(value)))
        try:
            return str(LLMatcher.grammar_from_lark(_lark(any_to_lark(value))))
        except NotOffered:
            raise
        except Exception as error:
            raise NotOffered(f"it cannot be read as Lark or as GBNF: {error}") from None
    return _tags(_read(value), options, special)


def within(frame: str, grammar: str) -> str:
    """`grammar` as `@answer` of the Lark `frame`; "" = by itself."""
    if not frame:
        return grammar
    frame = _lark(frame)
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**inner[0], "name": "answer"}, *inner[1:]]})


def explained(job: Mapping[str, Any], error: str) -> str:
    """Why there is no grammar of `job`, by tool and property where a schema is at fault. `error`: of llguidance."""
    kind = job["kind"]
    for text in (job["frame"], job["value"] if kind == "grammar" else ""):
        for _, _, schema in _schemas(text):
            place = _place(schema)
            if error_of(normalized(schema).schema):
                return f"{place}{blame(schema, error)}"
    if kind in ("json", "json_object"):
        return blame(_schema(job["value"] if kind == "json" else {"type": "object"}, job["options"]), error)
    return error if kind in ("grammar", "regex", "choice") else plain(error)


_JSON = "%json "


def _schemas(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Where JSON schemas stand in Lark, and what they are."""
    at, decoder = 0, json.JSONDecoder()
    while (found := lark.find(_JSON, at)) >= 0:
        begin = found + len(_JSON)
        begin += len(lark[begin:]) - len(lark[begin:].lstrip())
        try:
            schema, at = decoder.raw_decode(lark, begin)
        except ValueError:
            at = begin
            continue
        yield begin, at, schema


def _place(schema: Any) -> str:
    """What errors about a schema in Lark begin with."""
    place = schema.get(MARK) if isinstance(schema, dict) else None
    return f"{place}, " if isinstance(place, str) else ""


def _lark(lark: str) -> str:
    """Lark whose schemas are such as a grammar holds."""
    parts, at = list[str](), 0
    for begin, end, schema in _schemas(lark):
        try:
            made = normalized(schema).schema
        except NotOffered as error:
            raise NotOffered(f"{_place(schema)}{error}") from None
        parts += [lark[at:begin], json.dumps(made)]
        at = end
    return "".join([*parts, lark[at:]])


def _read(value: Any) -> Any:
    """JSON that was given as text, or as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise NotOffered(f"it is not JSON: {error}") from None


def _schema(value: Any, options: Mapping[str, Any]) -> Any:
    """A JSON schema that was given, as it is to be followed; `NotOffered` where drafts disagree on what it says."""
    schema = _read(value)
    if renamed_reference(schema):
        raise NotOffered("$id beside $ref means another thing in each draft of JSON Schema; leave that $id out")
    return _closed(schema) if options.get("disable_additional_properties") else schema


def _json(schema: Any, options: Mapping[str, Any]) -> str:
    asked: dict[str, Any] = {}
    if options.get("disable_any_whitespace"):
        asked["whitespace_flexible"] = False
    if options.get("whitespace_pattern") is not None:
        asked["whitespace_pattern"] = options["whitespace_pattern"]
    made = normalized(schema)
    if options.get("strict") and made.loose:
        raise NotOffered(f"{made.loose[0]}; strict refuses it, without that the answer is checked when it is whole")
    return str(LLMatcher.grammar_from_json_schema(json.dumps(made.schema), overrides=asked))


def _closed(schema: Any) -> Any:
    """`schema` with objects that have no other names than it lists, where it does not say."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(each) for name, each in schema.items()}
    if "properties" in made and not {"additionalProperties", "patternProperties"} & made.keys():
        made["additionalProperties"] = False
    return made


def _tags(value: Any, options: Mapping[str, Any], special: Collection[str]) -> str:
    """Free text in which what begins like one of some structures goes on like it (vLLM's and SGLang's form)."""
    if not isinstance(value, dict) or not {"structures", "triggers"} <= value.keys():
        raise NotOffered('give {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}')
    triggers, tags = value["triggers"], []
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise NotOffered("triggers: must be a list of texts")
    if not isinstance(value["structures"], list) or not value["structures"]:
        raise NotOffered("structures: must be a list of one at least")
    for place, each in enumerate(value["structures"]):
        texts = [each.get(name) for name in ("begin", "end")] if isinstance(each, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise NotOffered(f"structures[{place}]: must have begin and end, which are texts, and a schema")
        trigger = next((t for t in triggers if texts[0].startswith(t)), None)  # type: ignore[union-attr]
        if trigger is None:
            raise NotOffered(f"structures[{place}]: no trigger is how it begins")
        schema = _schema(each.get("schema", {}), options)
        try:
            schema = normalized(schema).schema
        except NotOffered as error:
            raise NotOffered(f"structures[{place}]: {error}") from None
        tags.append(StructTag(trigger=trigger, begin=texts[0], grammar=schema, end=texts[1]))
    apart = [t for t in triggers if t in special]
    if apart and len(apart) != len(triggers):
        raise NotOffered(f"triggers: {apart[0]!r} is a token of the model and others are text; give either")
    return str(StructTag.to_grammar(tags, assume_special=bool(apart)))
