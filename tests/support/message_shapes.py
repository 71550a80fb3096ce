"""Outputs as models write them in each format, drawn by a seed, with the messages that they say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "exact": {"type": "boolean"},
        },
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "number"}}},
    "now": {"type": "object", "properties": {}},
}
WORDS = (
    "Paris", "Zürich", "東京", "it's \"here\"", "a\nb", "back\\slash", "tab\t", "🙂", "{", "]}", "x, y)", "", " ",
    "<b>", "</p>", "null", "3", "[1]", "Let me look.", "ok: {\"a\": 1}", "\u2028",
)  # fmt: skip
BAR = "\uff5c"
LOW = "\u2581"


@dataclass
class Shape:
    """What a model wrote, and what it says. `calls`: names and arguments."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(WORDS)
    if kind == 2:
        return rng.choice([0, -1, 17, 2.5, 1e-7, 10**15])
    if kind < 5:
        return rng.choice([True, False, None])
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(("a", "é", "k k")): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A function and arguments of the types that it declares."""
    name = rng.choice(list(SCHEMAS))
    draw: dict[str, Callable[[], Any]] = {
        "string": lambda: rng.choice(WORDS),
        "integer": lambda: rng.randrange(-9, 99),
        "number": lambda: rng.choice([0, 2.5, -1e-3]),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [value(rng, 1) for _ in range(rng.randrange(3))],
        "object": lambda: {"k": value(rng, 1), "lé": value(rng, 1)},
    }
    properties = SCHEMAS[name]["properties"]
    return name, {key: draw[kind["type"]]() for key, kind in properties.items() if rng.random() < 0.8}


def dumps(rng: random.Random, item: Any) -> str:
    """JSON in one of the manners of models."""
    return json.dumps(item, ensure_ascii=rng.random() < 0.3, indent=rng.choice([None, None, 2]))


def as_object(rng: random.Random, called: tuple[str, Any], key: str = "arguments") -> str:
    """A call as an object, its members in either order."""
    members = [("name", called[0]), (key, called[1])]
    if rng.random() < 0.2:
        members.reverse()
    return dumps(rng, dict(members))


def bare(item: Any) -> str:
    """A value as it stands in a tag."""
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def hermes(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{as_object(rng, c)}\n</tool_call>" for c in calls)


def qwen3_coder(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        members = "".join(f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"

    return "\n".join(one(*c) for c in calls)


def glm4(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    gap = rng.choice(["\n", ""])

    def one(name: str, arguments: dict[str, Any]) -> str:
        members = "".join(
            f"<arg_key>{k}</arg_key>{gap}<arg_value>{bare(v)}</arg_value>{gap}" for k, v in arguments.items()
        )
        return f"<tool_call>{name}{gap}{members}</tool_call>"

    return "\n".join(one(*c) for c in calls)


def llama3_json(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    text = "; ".join(as_object(rng, c, "parameters") for c in calls)
    return rng.choice(["", "<|python_tag|>"]) + text


def pythonic(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def mistral(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    if rng.random() < 0.5:
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(rng, a)}" for n, a in calls)
    return "[TOOL_CALLS] [" + ", ".join(as_object(rng, c) for c in calls) + "]"


def mark(name: str) -> str:
    return f"<{BAR}tool{LOW}{name}{BAR}>"


def deepseek_v3(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    begin, end, sep = mark(f"call{LOW}begin"), mark(f"call{LOW}end"), mark("sep")
    parts = [f"{begin}function{sep}{n}\n```json\n{dumps(rng, a)}\n```{end}" for n, a in calls]
    return mark(f"calls{LOW}begin") + "\n".join(parts) + mark(f"calls{LOW}end")


def deepseek_v31(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    begin, end, sep = mark(f"call{LOW}begin"), mark(f"call{LOW}end"), mark("sep")
    parts = [f"{begin}{n}{sep}{dumps(rng, a)}{end}" for n, a in calls]
    return mark(f"calls{LOW}begin") + "".join(parts) + mark(f"calls{LOW}end")


def granite(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    marker = rng.choice(["<|tool_call|>", "<tool_call>"])
    return marker + "[" + ", ".join(as_object(rng, c) for c in calls) + "]"


def openai(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    form = rng.choice([
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
        " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>",
    ])  # fmt: skip
    return "<|start|>assistant".join(form.format(n, dumps(rng, a)) for n, a in calls)


WRITERS = {
    f.__name__: f
    for f in (
        hermes, qwen3_coder, glm4, llama3_json, pythonic, mistral, deepseek_v3, deepseek_v31, granite, openai,
    )
}  # fmt: skip
BROKEN = {
    "hermes": "<tool_call>\n{name: get_weather}\n</tool_call>",
    "qwen3_coder": "<tool_call>\nget_weather(city)\n</tool_call>",
    "glm4": "<tool_call>\n</tool_call>",
    "llama3_json": '{"name": "Bob", "parameters": {}}',
    "pythonic": "[1, 2]",
    "mistral": "[TOOL_CALLS]{broken",
    "deepseek_v3": mark(f"calls{LOW}begin") + "nothing",
    "deepseek_v31": mark(f"call{LOW}begin") + "now" + mark("sep") + "nothing",
    "granite": "<|tool_call|>[{]",
    "openai": "<|channel|>oops",
}
ALONE = ("llama3_json", "pythonic")
"""Formats whose messages are calls or content."""
TEXTS = ("Let me see.", "Ünïcode 東京 < [ {", "Two\n\nlines.", "1 < 2 and <b>")


def shape(name: str, seed: int) -> Shape:
    """The `seed`-th shape of a format: calls, text around them, what is malformed."""
    rng = random.Random(f"{name} {seed}")
    kind = rng.randrange(10)
    before = rng.choice(TEXTS) if rng.random() < 0.5 else ""
    if kind == 0:
        return _said(name, rng.choice(TEXTS))
    if kind == 1:
        return Shape(BROKEN[name], BROKEN[name])
    calls = [call(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    text = WRITERS[name](rng, calls)
    if name == "openai":
        head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        said = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant" if before else ""
        return Shape(head + said + text, before, "Hm.", calls)
    if name in ALONE and (not text.startswith("<|") or name == "pythonic"):
        return Shape(text, "", "", calls)
    return Shape(f"{before}\n{text}" if before else text, before, "", calls)


def _said(name: str, text: str) -> Shape:
    return Shape(f"<|channel|>final<|message|>{text}<|return|>" if name == "openai" else text, text)
