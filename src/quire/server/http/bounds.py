"""How much there may be of everything in a body, of whatever API: one table, looked at before any other work.

Sizes are bounded beside it: the bytes of a body (`--max-body-bytes`), its values and depth (`server.http.parsing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.core.errors import BadRequest
from quire.core.params import MAX_BIASES, MAX_STOP_STRINGS
from quire.core.structured import MAX_CHOICES
from quire.server.http.parsing import MAX_VALUES

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Bound(NamedTuple):
    """Bound of a list or an object: `items` in itself, `values` in all of it, and what its members may have.

    0 = as many as a body has.
    """

    items: int = 0
    values: int = 0
    members: Mapping[str, Bound] = NOTHING


MAX_FIELDS = 512
"""Fields of a body."""
MAX_MESSAGES = 8192
MAX_TOOLS = 128
_CALLS, _PARTS, _TEXTS = Bound(MAX_TOOLS), Bound(1024), Bound(1024)
_SHAPE = Bound(values=32_768)
"""JSON schemas: nodes, names and numbers in all of them."""
_STOPS = Bound(MAX_STOP_STRINGS)
_BIASES = Bound(MAX_BIASES)
_MESSAGES = Bound(MAX_MESSAGES, 65_536, {"content": _PARTS, "tool_calls": _CALLS, "images": _PARTS})
_DOCUMENTS = Bound(8192)

BOUNDS: Mapping[str, Bound] = {
    "messages": _MESSAGES,
    "prompt": Bound(),
    "input": Bound(members={"content": _PARTS, "output": _PARTS, "summary": _PARTS}),
    "inputs": Bound(members={"sentences": _DOCUMENTS}),
    "tokens": Bound(),
    "allowed_token_ids": Bound(),
    "stop_token_ids": _TEXTS,
    "bad_words": _TEXTS,
    "logit_bias": _BIASES,
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "system": _PARTS,
    "images": _PARTS,
    "documents": _DOCUMENTS,
    "texts": _DOCUMENTS,
    "text_1": _DOCUMENTS,
    "text_2": _DOCUMENTS,
    "tools": Bound(MAX_TOOLS, 32_768),
    "functions": Bound(MAX_TOOLS, 32_768),
    "response_format": _SHAPE,
    "structured_outputs": Bound(values=32_768, members={"choice": Bound(MAX_CHOICES)}),
    "guided_json": _SHAPE,
    "guided_choice": Bound(MAX_CHOICES),
    "json_schema": _SHAPE,
    "format": _SHAPE,
    "text": _SHAPE,
    "output_config": _SHAPE,
    "parameters": Bound(values=32_768, members={"stop": _STOPS}),
    "options": Bound(4096, 4096, {"stop": _STOPS}),
    "chat_template_kwargs": Bound(64, 1024),
    "metadata": Bound(64, 64),
    "include": Bound(64),
}
"""By the name of a body's field, which means the same in every API that has it."""
REST = Bound(4096, 4096)
"""Of any other field, known or not."""
MAY_BE_PROMPTS = ("prompt", "input", "inputs")
PROMPTS = Bound(8192)
"""Of these, where they are more than the token ids of one prompt."""


def check_counts(body: Any, size: int) -> None:
    """`BadRequest` naming the first field of a body of `size` bytes that has more in it than it may."""
    if not isinstance(body, dict):
        return
    if len(body) > MAX_FIELDS:
        raise BadRequest(f"the body: {len(body)} fields are more than {MAX_FIELDS}")
    for name, value in body.items():
        if isinstance(value, (list, dict)):
            bound = BOUNDS.get(name, REST)
            if (
                name in ("prompt", "input", "inputs")
                and value
                and not (isinstance(value, list) and isinstance(value[0], int))
            ):
                bound = bound._replace(items=PROMPTS.items)
            _check(value, bound, name[:100], size)


def _check(value: list[Any] | dict[str, Any], bound: Bound, at: str, size: int) -> None:
    if 0 < bound.items < len(value):
        raise BadRequest(f"{at}: {len(value)} are more than {bound.items}", param=at)
    if 0 < bound.values < size // 2 and (count := _values(value)) > bound.values:
        raise BadRequest(f"{at}: {count} values, at any depth, are more than {bound.values}", param=at)
    if not bound.members:
        return
    for i, item in enumerate((value,) if isinstance(value, dict) else value):
        for name in bound.members.keys() & item.keys() if isinstance(item, dict) else ():
            if isinstance(item[name], (list, dict)):
                place = at if item is value else f"{at}[{i}]"
                _check(item[name], bound.members[name], f"{place}.{name}", size)


def _values(value: list[Any] | dict[str, Any]) -> int:
    """How many texts, numbers, lists and objects are in it."""
    count, left = 0, [value]
    while left:
        found = left.pop()
        items = found.values() if isinstance(found, dict) else found
        count += len(items)
        left += [item for item in items if isinstance(item, (list, dict))]
    return count


assert all(bound.values <= MAX_VALUES for bound in BOUNDS.values())
