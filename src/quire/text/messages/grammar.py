"""Grammars (Lark, as llguidance reads it) that force calls of the formats which write them as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around calls: `marker`, `begin` ... `end`, `closer`; `between` two, "" = each has its own frame."""

    marker: str = ""
    begin: str = ""
    end: str = ""
    closer: str = ""
    between: str = ""
    field: str = "arguments"


def calls_grammar(frame: Frame, tools: Tools, choice: str | None, parallel: bool, special: Mapping[str, int]) -> str:
    """One call of `choice`, else of any of `tools`; several where `parallel`. Markers in `special` are tokens by id."""
    functions = [tool["function"] for tool in tools if choice in (None, tool["function"]["name"])]
    objects = [f"%json {json.dumps(_schema(function, frame.field))}" for function in functions]
    begin, end = (
        " ".join(part for part in parts if part)
        for parts in (
            (_terminal(frame.marker, special), _terminal(frame.begin, special)),
            (_terminal(frame.end, special), _terminal(frame.closer, special)),
        )
    )
    one, more = (
        ("call", f"({_terminal(frame.between, special)} call)*") if frame.between else ("framed", '("\\n" framed)*')
    )
    several = f"{one} {more}" if parallel else one
    start = f"{begin} {several} {end}" if frame.between else several
    lines = [f"start: {start.strip()}", "call: " + " | ".join(f"call{i}" for i in range(len(objects)))]
    if not frame.between:
        lines.append(f"framed: {begin} call {end}")
    return "\n".join([*lines, *(f"call{i}: {found}" for i, found in enumerate(objects))])


def _terminal(text: str, special: Mapping[str, int]) -> str:
    if text in special:
        return f"<[{special[text]}]>"
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, field: function.get("parameters") or {"type": "object"}},
        "required": ["name", field],
        "additionalProperties": False,
    }
