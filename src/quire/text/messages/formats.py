"""The formats: rows by the names of vLLM's parsers, and the marks by which a chat template shows which it speaks.
See docs/design/messages.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.core.request import random_id
from quire.text.messages import harmony, json_calls
from quire.text.messages.argument_grammar import Tags, keywords
from quire.text.messages.grammar import Frame
from quire.text.messages.ids import call_id, short_id
from quire.text.messages.pythonic import pythonic
from quire.text.messages.reasoning import ReasoningFormat
from quire.text.messages.tagged import glm4, qwen3_coder
from quire.text.messages.text_source import MAX_NAME, Malformed, Steps, TextSource

Body = Callable[[TextSource, str], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A row. `frame`: how calls are written, `bare`: what a message begins with that calls without a marker.

    `text_arguments`: its templates write a call's arguments as they are, others want them as an object.
    `inner`: markers within calls. `short_ids`: its templates take ids of nine letters and digits alone.
    """

    name: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    body: Body
    frame: Frame
    bare: str = ""
    text_arguments: bool = False
    inner: tuple[str, ...] = ()
    short_ids: bool = False

    def call_id(self) -> str:
        """A new id of a call."""
        return short_id(random_id()) if self.short_ids else call_id()

    @property
    def markers(self) -> frozenset[str]:
        """Strings that are no text where they are special tokens."""
        return frozenset((*self.openers, *self.closers, *self.inner))


def _json(source: TextSource, _: str) -> Steps[None]:
    yield from source.space()
    yield from json_calls.calls(source)


def _llama3(source: TextSource, opener: str) -> Steps[None]:
    yield from source.space()
    yield from json_calls.calls(source, known=not opener)
    while True:
        yield from source.space()
        if not (yield from source.accept(";")):
            return
        yield from source.space()
        yield from json_calls.calls(source, known=not opener)


def _mistral(source: TextSource, _: str) -> Steps[None]:
    """A list of calls, or since 2025 NAME[ARGS]{...}, with an id between where a call has one."""
    yield from source.space()
    if (yield from source.ahead(1)) in ("[", "{"):
        yield from json_calls.calls(source)
        return
    name, marker = yield from source.until_one(("[ARGS]", "[CALL_ID]"), MAX_NAME)
    if marker == "[CALL_ID]":
        yield from source.until_one(("[ARGS]",), MAX_NAME)
    yield from json_calls.arguments(source, name.strip())


_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)


def _deepseek_v3(source: TextSource, opener: str) -> Steps[None]:
    """TYPE, a separator, NAME, and the arguments as a block of code."""
    yield from _deepseek_begin(source, opener)
    yield from source.until_one((_SEP,), MAX_NAME)
    name, _ = yield from source.until_one(("\n",), MAX_NAME)
    yield from source.expect("```json")
    yield from json_calls.arguments(source, name.strip())
    yield from source.space()
    yield from source.expect("```")


def _deepseek_v31(source: TextSource, opener: str) -> Steps[None]:
    yield from _deepseek_begin(source, opener)
    name, _ = yield from source.until_one((_SEP,), MAX_NAME)
    yield from json_calls.arguments(source, name.strip())


def _deepseek_begin(source: TextSource, opener: str) -> Steps[None]:
    if opener == _CALLS:
        yield from source.space()
        yield from source.expect(_CALL)


def _harmony(source: TextSource, _: str) -> Steps[None]:
    raise Malformed  # harmony is read as a whole


_NAMED = '{"name": "NAME", "arguments": '
_XML = ("<tool_call>", "</tool_call>")
HARMONY = "openai"

TOOLS = {
    row.name: row
    for row in (
        ToolFormat("hermes", _XML[:1], _XML[1:], _json,
                   Frame("\n" + _NAMED, "}\n</tool_call>", "<tool_call>", between="\n", each=True)),
        ToolFormat("qwen3_coder", ("<tool_call>", "<function="), _XML[1:], qwen3_coder,
                   Frame("\n<function=NAME>\n", "</function>\n</tool_call>", "<tool_call>", between="\n", each=True,
                         arguments=Tags("<parameter=KEY>\n", "\n</parameter>", "\n", "</parameter>"))),
        ToolFormat("llama3_json", ("<|python_tag|>",), (), _llama3,
                   Frame('{"name": "NAME", "parameters": ', "}", between="; "), "{"),
        ToolFormat("pythonic", ("<|python_start|>",), ("<|python_end|>",), pythonic,
                   Frame("NAME(", ")", begin="[", end="]", between=", ", arguments=keywords), "["),
        ToolFormat("mistral", ("[TOOL_CALLS]",), (), _mistral,
                   Frame(_NAMED, "}", "[TOOL_CALLS]", "[", "]", ", "),
                   inner=("[ARGS]", "[CALL_ID]"), short_ids=True),
        ToolFormat("deepseek_v3", (_CALLS, _CALL), (_CALL_END, _CALLS_END), _deepseek_v3,
                   Frame(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}", _CALLS, "", _CALLS_END, "\n"),
                   text_arguments=True, inner=(_SEP,)),
        ToolFormat("deepseek_v31", (_CALLS, _CALL), (_CALL_END, _CALLS_END), _deepseek_v31,
                   Frame(f"{_CALL}NAME{_SEP}", _CALL_END, _CALLS, "", _CALLS_END),
                   text_arguments=True, inner=(_SEP,)),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), ("</tool_call>", "<|end_of_text|>"), _json,
                   Frame(_NAMED, "}", "<|tool_call|>", "[", "]", ", ")),
        ToolFormat("glm4", _XML[:1], _XML[1:], glm4,
                   Frame("NAME\n", "</tool_call>", "<tool_call>", between="\n", each=True,
                         arguments=Tags("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "\n", "</arg_value>")),
                   inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
        ToolFormat(HARMONY, harmony.MARKERS, (), _harmony,
                   Frame("NAME <|constrain|>json<|message|>", opener=harmony.CALL, alone=True)),
    )
}  # fmt: skip

GENERIC = ToolFormat("json", (), (), _json, Frame(_NAMED, "}", begin="[", end="]", between=", "), bare="[")
"""A list of calls as JSON: for calls that are forced of a model that speaks none of these."""

_THINK = ("<think>",), ("</think>",)
REASONING = {
    row.name: row
    for row in (
        ReasoningFormat("deepseek_r1", *_THINK, assumed=True),
        ReasoningFormat("qwen3", *_THINK),
        ReasoningFormat("glm4", *_THINK),
        ReasoningFormat("granite", ("Here is my thought process:", "Here's my thought process:"),
                        ("Here is my response:", "Here's my response:")),
        ReasoningFormat(HARMONY, (), ()),
    )
}  # fmt: skip

ALIASES = {
    "qwen": "hermes", "qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic",
    "glm45": "glm4", "openai_gptoss": HARMONY, "gpt_oss": HARMONY, "gpt-oss": HARMONY,
}  # fmt: skip

_TOOL_MARKS: Sequence[tuple[tuple[str, ...], str]] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm4"),
    ((_CALLS, "```json"), "deepseek_v3"),
    ((_CALLS,), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_REASONING_MARKS: Sequence[tuple[tuple[str, ...], str]] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("Here is my thought process",), "granite"),
    (("<arg_key>", "<think>"), "glm4"),
    (("enable_thinking", "<think>"), "qwen3"),
    (("</think>",), "deepseek_r1"),
)


def tool_format(name: str | None, template: str) -> ToolFormat | None:
    """The row called `name`, else the one whose marks `template` has, if any. `ConfigError` for no known name."""
    found = _found(name, template, tuple(TOOLS), _TOOL_MARKS, "tool_call_parser")
    return None if found is None else TOOLS[found]


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Find the format of reasoning of a template."""
    found = _found(name, template, tuple(REASONING), _REASONING_MARKS, "reasoning_parser")
    return None if found is None else REASONING[found]


def _found(
    name: str | None, template: str, known: tuple[str, ...], marks: Sequence[tuple[tuple[str, ...], str]], param: str
) -> str | None:
    if name is None:
        return next((row for needles, row in marks if all(needle in template for needle in needles)), None)
    name = ALIASES.get(name, name)
    if name not in known:
        option = "--" + param.replace("_", "-")
        raise ConfigError(f"{option} {name!r} is not one of {', '.join(sorted(known))}", param=param)
    return name
