"""Lark, as llguidance reads it, of what a model writes in a format: calls of tools, reasoning, an answer behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import BadRequest
from quire.text.messages.reasoning import ReasoningFormat
from quire.text.structured.completion_search import token_name
from quire.text.structured.grammar_source import LARK
from quire.text.structured.schemas.work import MARK

Tools = Sequence[Mapping[str, Any]]


class LarkRules:
    """Rules of one grammar as they are made. `special`: tokens that no text spells, which stand for themselves.

    `where`: whose schemas these are, in words.
    """

    def __init__(self, special: Collection[str]) -> None:
        self._special = frozenset(special)
        names = sorted(map(re.escape, special), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(names)})") if names else None
        self.lines: list[str] = []
        self.where = ""

    def lark(self, start: str) -> str:
        """All rules as one Lark grammar."""
        return LARK + "\n".join([f"start: {start}", *self.lines, ""])

    def rule(self, body: str) -> str:
        """The name of another rule."""
        self.lines.append(f"r{len(self.lines)}: {body}")
        return f"r{len(self.lines) - 1}"

    def terminal(self, body: str) -> str:
        """The name of another terminal, a regular expression."""
        self.lines.append(f"T{len(self.lines)}: {body}")
        return f"T{len(self.lines) - 1}"

    def said(self, text: str) -> str:
        """Exactly this."""
        parts = [text] if self._cut is None else self._cut.split(text)
        return " ".join(token_name(part) if part in self._special else _quoted(part) for part in parts if part)

    def json(self, schema: Mapping[str, Any], place: str = "") -> str:
        """A value of JSON. `place`: of the schema within the tool, in words."""
        named = ", ".join(filter(None, [self.where, place]))
        return f"%json {json.dumps({**schema, MARK: named} if named else schema)}"

    def text(self, without: Sequence[str] = (), least: int = 0, most: int | None = None) -> str:
        """A terminal of `least` to `most` characters in which none of `without` stands."""
        size = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        spelled = [text for text in without if text not in self._special]
        return self.terminal(" & ".join([f"/(.|\\n){size}/", *(f"~/(.|\\n)*{_escaped(t)}(.|\\n)*/" for t in spelled)]))

    def until(self, text: str, ends: Sequence[str]) -> str:
        """The terminal `text`, which has none of `ends`, and one of them.

        One terminal, as what begins like an end could be more of the text.
        """
        spelled = " | ".join(_quoted(end) for end in ends if end not in self._special)
        ways = [f"{text} {token_name(end)}" for end in ends if end in self._special]
        if spelled:
            ways.append(self.terminal(f"{text} ({spelled})"))
        return f"({' | '.join(ways)})"


Arguments = Callable[[LarkRules, Mapping[str, Any]], str]
"""How a format writes the arguments of a JSON schema; `BadRequest`, its param the place in the schema, if it cannot."""


def _as_json(rules: LarkRules, schema: Mapping[str, Any]) -> str:
    return rules.json(schema)


@dataclass(frozen=True, slots=True)
class Frame:
    """How a format writes calls: `opener`, `begin`, calls with `between` two of them, `end`.

    `before` and `after` stand around a call's `arguments`; "NAME" is the function's. `each`: every call has an opener.
    `alone`: there is never more than one.
    """

    before: str
    after: str = ""
    opener: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    each: bool = False
    alone: bool = False
    arguments: Arguments = _as_json

    def calls(self, rules: LarkRules, tools: Tools, choice: str | None, parallel: bool) -> str:
        """Calls of `choice`, else of any of `tools`, several if `parallel`, behind the first opener."""
        made = [self._call(rules, i, tool["function"]) for i, tool in enumerate(tools)
                if choice in (None, tool["function"]["name"])]  # fmt: skip
        call = rules.rule(" | ".join(made))
        more = " ".join(filter(None, [rules.said(self.between + (self.opener if self.each else "")), call]))
        several = f"{call} ({more})*" if parallel and not self.alone else call
        return rules.rule(" ".join(filter(None, [rules.said(self.begin), several, rules.said(self.end)])))

    def _call(self, rules: LarkRules, place: int, function: Mapping[str, Any]) -> str:
        schema = {"type": "object", **(function.get("parameters") or {})}
        at = f"tools[{place}].function.parameters"
        if schema["type"] != "object":
            raise BadRequest(f"{at}.type: must be 'object'", param=f"{at}.type")
        rules.where = f"tool {function['name']!r}"
        try:
            inner = self.arguments(rules, schema)
        except BadRequest as error:
            raise BadRequest(f"{at}.{error.message}", param=f"{at}.{error.param}") from None
        before = rules.said(self.before.replace("NAME", function["name"]))
        return rules.rule(" ".join(filter(None, [before, inner, rules.said(self.after)])))


def reasoning_before(row: ReasoningFormat, inside: bool | None, rules: LarkRules) -> str:
    """Reasoning of the format, which the prompt has begun (`inside`), ended (False), or says nothing of (None)."""
    if inside is False or not row.closers:
        return ""
    body = f"{rules.until(rules.text(row.closers), row.closers)} /\\n{{0,2}}/"
    if inside:
        return body
    opener = " | ".join(map(rules.said, row.openers))
    return f"({opener})? {body}" if row.assumed else f"(({opener}) {body})?"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
