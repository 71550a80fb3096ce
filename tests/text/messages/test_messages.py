"""Messages in a model's text: every format, however the text is cut, whole, cut off and malformed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_shapes import ALONE, SCHEMAS, WRITERS, shape
from quire.core.errors import ConfigError
from quire.text.messages.formats import ALIASES, REASONING, TOOLS, reasoning_format, tool_format
from quire.text.messages.parser import Parser
from quire.text.messages.text_source import MAX_HELD, MessageDelta, ParserRequest

FORMATS = list(WRITERS)


@dataclass
class Said:
    """The deltas of a message put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, deltas: Iterable[MessageDelta]) -> None:
        for delta in deltas:
            if delta.kind == "call":
                assert delta.index == len(self.calls)
                assert delta.id == f"call{delta.index}"
                self.calls.append([delta.name, ""])
            elif delta.kind == "arguments":
                assert delta.index == len(self.calls) - 1
                assert delta.text
                self.calls[-1][1] += delta.text
            elif delta.kind == "content":
                self.content += delta.text
            else:
                self.reasoning += delta.text


def parser(
    tools: str | None, reasoning: str | None = None, inside: bool | None = None, hidden: Sequence[str] = ()
) -> Parser:
    numbers = count()
    reading = ParserRequest(lambda: f"call{next(numbers)}", SCHEMAS, inside, frozenset(hidden))
    return Parser(REASONING.get(reasoning or ""), TOOLS.get(tools or ""), reading)


def read(parts: Iterable[str], parser: Parser) -> Said:
    said = Said()
    for part in parts:
        said.add(parser.push(part))
    said.add(parser.end())
    return said


def cut(text: str, at: Iterable[int]) -> list[str]:
    places = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def is_beginning(text: str) -> bool:
    """Whether `text` begins some JSON object: it is one once strings, atoms and brackets are closed in some way."""
    stack, quoted, escaped = [], False, False
    for char in text:
        if quoted:
            escaped, quoted = (char == "\\" and not escaped), (char != '"' or escaped)
        elif char == '"':
            quoted = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]":
            stack.pop()
    close = "".join(reversed(stack))
    tails = ('"', '":0') if quoted else ("", "0", ":0", '"a":0', "null")
    for tail in tails:
        try:
            json.loads(text + tail + close)
            return True
        except ValueError:
            continue
    return False


def check(name: str, seed: int, whole: bool) -> None:
    """One shape: what it says, at once, by characters and split at places; cut off it never says more, nor raises."""
    found, rng = shape(name, seed), random.Random(seed)
    once = read([found.text], parser(name))
    assert once.content == found.content
    assert once.reasoning == found.reasoning
    assert [(n, json.loads(a)) for n, a in once.calls] == found.calls
    assert read(found.text, parser(name)) == once
    places = range(1, len(found.text)) if whole else [rng.randrange(len(found.text)) for _ in range(3)]
    for place in places:
        assert read(cut(found.text, [place]), parser(name)) == once
    for place in places if whole else places[:1]:
        short = found.text[:place]
        said = read([short], parser(name))
        assert read(short, parser(name)) == said
        assert all(not a or is_beginning(a) for _, a in said.calls), said
        if said.calls:
            full = once.calls[len(said.calls) - 1][1]
            assert full.startswith(said.calls[-1][1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
def test_shapes(name: str) -> None:
    for seed in range(500):
        check(name, seed, whole=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_shapes_split_at_every_place(name: str) -> None:
    for seed in range(500):
        check(name, seed, whole=True)


ALPHABET = st.sampled_from([
    "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"a": 1}', "}", "[", "]", '"', "\\", "\n", "x",
    ", ",
    "<function=now>", "<parameter=a>", "</parameter>", "</function>", "<think>", "</think>", "now(", "a=", ")", "'",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "analysis",
    "<|message|>", "<|end|>", "<|start|>", "assistant", " to=functions.now", "<|call|>", ";", "<", "1e", "tru",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(ALPHABET, max_size=14), st.sampled_from(FORMATS), st.sampled_from([None, "qwen3", "deepseek_r1"]))
def test_any_text_however_it_is_cut(parts: list[str], name: str, reasoning: str | None) -> None:
    text = "".join(parts)
    once = read([text], parser(name, reasoning))
    assert read(text, parser(name, reasoning)) == once
    assert read(parts, parser(name, reasoning)) == once
    assert all(not a or is_beginning(a) for _, a in once.calls)


REASONED = [
    ("deepseek_r1", None, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", None, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", False, "Yes.", "", "Yes."),
    ("qwen3", None, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", True, "Hm. < 3\n</think>\nYes.", "Hm. < 3", "Yes."),
    ("qwen3", None, "Yes.", "", "Yes."),
    ("qwen3", True, "Hm. cut o", "Hm. cut o", ""),
    ("glm4", None, "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
    ("granite", None, "Here is my thought process: Hm. Here is my response: Yes.", "Hm.", "Yes."),
    ("granite", None, "Here is my answer.", "", "Here is my answer."),
    ("openai", None, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     "Hm.", "Yes."),
    ("openai", None, "Yes.", "", "Yes."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "text", "reasoning", "content"), REASONED)
def test_reasoning_split_at_every_place(
    name: str, inside: bool | None, text: str, reasoning: str, content: str
) -> None:
    for parts in (text, *(cut(text, [place]) for place in range(len(text)))):
        assert read(parts, parser(None, name, inside)) == Said(content, reasoning)


def test_reasoning_before_a_call() -> None:
    text = '<think>a</think>\n\nb\n<tool_call>{"name": "now"}</tool_call>'
    assert read(text, parser("hermes", "qwen3")) == Said("b", "a", [["now", "{}"]])


def test_arguments_that_break_off_keep_their_beginning() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": [1, oops]}}</tool_call> then'
    said = read(text, parser("hermes"))
    assert said.calls == [["now", '{"a": [1, ']]
    assert said.content == "oops]}}</tool_call> then"


def test_arguments_as_a_string_of_json() -> None:
    text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(text, parser("hermes")).calls == [["now", '{"a": 1}']]


def test_hidden_markers_are_shown_to_nobody() -> None:
    hidden = ("<tool_call>", "</tool_call>")
    assert read("a <tool_call>b</tool_call> c", parser("hermes", hidden=hidden)).content == "a b c"
    assert read("a <tool_call>b</tool_call> c", parser("hermes")).content == "a <tool_call>b</tool_call> c"


@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_held_back_is_bounded(size: int) -> None:
    text = '<tool_call>{"arguments": "' + "x" * (MAX_HELD + 5000)
    mine = parser("hermes")
    said = Said()
    for start in range(0, len(text), size):
        said.add(mine.push(text[start : start + size]))
    assert said.content == text


def test_formats_by_marks_of_templates() -> None:
    found = {
        "hermes": "{{ '<tool_call>' }}",
        "qwen3_coder": "<tool_call><function=x>",
        "glm4": "<tool_call>{{ n }}<arg_key>",
        "mistral": "[TOOL_CALLS]",
        "granite": "<|tool_call|>",
        "openai": "<|start|><|channel|>x<|message|>",
        "deepseek_v3": TOOLS["deepseek_v3"].openers[0] + "```json",
        "deepseek_v31": TOOLS["deepseek_v3"].openers[0],
        "llama3_json": '<|start_header_id|> {"name": n, "parameters": p}',
        "pythonic": "[func_name1(params)]",
    }
    assert set(found) == set(FORMATS) == set(TOOLS)
    for name, template in found.items():
        row = tool_format(None, template)
        assert row is not None
        assert row.name == name
    assert tool_format(None, "{{ messages }}") is None
    thinks = {"qwen3": "enable_thinking <think>", "deepseek_r1": "</think>", "glm4": "<arg_key><think>"}
    for name, template in thinks.items():
        reasoning = reasoning_format(None, template)
        assert reasoning is not None
        assert reasoning.name == name
    assert set(ALIASES.values()) <= {*TOOLS, *REASONING}
    with pytest.raises(ConfigError, match="--tool-call-parser 'x' is not one of deepseek_v3"):
        tool_format("x", "")


def test_bare_calls_are_those_of_declared_functions() -> None:
    for name, text in zip(ALONE, ('{"name": "other", "parameters": {}}', "[other()]"), strict=True):
        assert read(text, parser(name)) == Said(text)
