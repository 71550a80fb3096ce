"""What an answer is checked by when it is whole: the schemas that it was to follow, as they were given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.structured import StructuredOutputsParams
from quire.text.structured.schema_checker import CHECKER, SchemaError

MOST = 64
"""Calls, and parts between tags, of one answer that are checked."""


@dataclass(frozen=True, slots=True)
class AnswerChecks:
    """Schemas of a text, of what stands between tags in it, and of calls' arguments by functions.

    Each is JSON, or its text. `content` None: any text will do.
    """

    content: Any = None
    tags: Sequence[tuple[str, Any]] = ()
    calls: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.content is not None or bool(self.tags) or bool(self.calls)

    def errors(self, text: str, calls: Sequence[tuple[str, str]] = (), choice: int = 0) -> list[SchemaError]:
        """What schemas do not allow of a choice's text, and of its calls: names and arguments.

        It waits for a process, so it is no work for an event loop.
        """
        found = []
        if self.content is not None and (text or not calls):
            found += CHECKER.errors(_text(self.content), text, choice=choice)
        for schema, part in self._between(text):
            found += CHECKER.errors(_text(schema), part, choice=choice)
        for name, arguments in calls[:MOST]:
            if name in self.calls:
                found += CHECKER.errors(_text(self.calls[name]), arguments or "{}", tool=name, choice=choice)
        return found

    def _between(self, text: str) -> list[tuple[Any, str]]:
        """What stands behind beginnings of tags, each with its schema."""
        found, decoder = list[tuple[Any, str]](), json.JSONDecoder()
        for begin, schema in self.tags:
            at = text.find(begin)
            while at >= 0 and len(found) < MOST:
                start = at + len(begin)
                start += len(text[start:]) - len(text[start:].lstrip())
                try:
                    _, end = decoder.raw_decode(text, start)
                except (ValueError, RecursionError):
                    end = start
                if end > start:
                    found.append((schema, text[start:end]))
                at = text.find(begin, max(end, at + 1))
        return found


NO_CHECKS = AnswerChecks()
"""Any text will do, or its grammar says all."""


def checks_of(shape: StructuredOutputsParams | None) -> AnswerChecks:
    """Find by what a text of `shape` is checked; nothing where its grammar says all."""
    if shape is None or (shape.json is None and shape.structural_tag is None):
        return NO_CHECKS
    if shape.json is not None:
        return AnswerChecks(shape.json)
    given = shape.structural_tag
    try:
        given = json.loads(given) if isinstance(given, str) else given
        tags = [(each["begin"], each.get("schema", {})) for each in given["structures"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return NO_CHECKS  # it is no shape, which whoever reads it says
    return AnswerChecks(tags=tags)


def _text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
