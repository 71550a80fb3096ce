"""The formats: rows by the names of vLLM's parsers, and the marks by which a chat template shows which it speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ConfigError
from quire.text.messages import harmony, json_calls
from quire.text.messages.grammar import Frame, Tools, calls_grammar
from quire.text.messages.pythonic import pythonic
from quire.text.messages.reasoning import ReasoningFormat
from quire.text.messages.source import MAX_NAME, Malformed, Source, Steps
from quire.text.messages.tagged import glm4, qwen3_coder

Body = Callable[[Source, str], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A row. `bare`: what a message begins with that calls without a marker. `frame`: how calls are forced.

    `text_arguments`: its templates write a call's arguments as they are, others want them as an object.
    `inner`: markers within calls.
    """

    name: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    body: Body
    bare: str = ""
    frame: Frame | None = None
    text_arguments: bool = False
    inner: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Strings that are no text where they are special tokens."""
        return frozenset((*self.openers, *self.closers, *self.inner))

    def grammar(self, tools: Tools, choice: str | None, parallel: bool, special: Mapping[str, int]) -> dict[str, Any]:
        """`structured_outputs` that force calls: of the function `choice`, or of any of `tools`, several if `parallel`.

        `special`: ids of the tokenizer's special tokens. `ConfigError` where calls of this format cannot be forced.
        """
        if self.frame is None:
            raise ConfigError(f"tool calls of the format {self.name} cannot be forced", param="tool_choice")
        return {"grammar": calls_grammar(self.frame, tools, choice, parallel, special)}


def _json(source: Source, _: str) -> Steps[None]:
    yield from source.space()
    yield from json_calls.calls(source)


def _llama3(source: Source, opener: str) -> Steps[None]:
    yield from source.space()
    yield from json_calls.calls(source, known=not opener)
    while True:
        yield from source.space()
        if not (yield from source.accept(";")):
            return
        yield from source.space()
        yield from json_calls.calls(source, known=not opener)


def _mistral(source: Source, _: str) -> Steps[None]:
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


def _deepseek_v3(source: Source, opener: str) -> Steps[None]:
    """TYPE, a separator, NAME, and the arguments as a block of code."""
    yield from _deepseek_begin(source, opener)
    yield from source.until_one((_SEP,), MAX_NAME)
    name, _ = yield from source.until_one(("\n",), MAX_NAME)
    yield from source.expect("```json")
    yield from json_calls.arguments(source, name.strip())
    yield from source.space()
    yield from source.expect("```")


def _deepseek_v31(source: Source, opener: str) -> Steps[None]:
    yield from _deepseek_begin(source, opener)
    name, _ = yield from source.until_one((_SEP,), MAX_NAME)
    yield from json_calls.arguments(source, name.strip())


def _deepseek_begin(source: Source, opener: str) -> Steps[None]:
    if opener == _CALLS:
        yield from source.space()
        yield from source.expect(_CALL)


def _harmony(source: Source, _: str) -> Steps[None]:
    raise Malformed  # harmony is read as a whole


_XML = ("<tool_call>", "</tool_call>")
HARMONY = "openai"

TOOLS = {
    row.name: row
    for row in (
        ToolFormat("hermes", _XML[:1], _XML[1:], _json, frame=Frame("<tool_call>", "\n", "\n", "</tool_call>")),
        ToolFormat("qwen3_coder", ("<tool_call>", "<function="), _XML[1:], qwen3_coder),
        ToolFormat("llama3_json", ("<|python_tag|>",), (), _llama3, "{", Frame(field="parameters", between="; ")),
        ToolFormat("pythonic", ("<|python_start|>",), ("<|python_end|>",), pythonic, "["),
        ToolFormat("mistral", ("[TOOL_CALLS]",), (), _mistral, frame=Frame("[TOOL_CALLS]", "[", "]", between=", "),
                   inner=("[ARGS]", "[CALL_ID]")),
        ToolFormat("deepseek_v3", (_CALLS, _CALL), (_CALL_END, _CALLS_END), _deepseek_v3,
                   text_arguments=True, inner=(_SEP,)),
        ToolFormat("deepseek_v31", (_CALLS, _CALL), (_CALL_END, _CALLS_END), _deepseek_v31,
                   text_arguments=True, inner=(_SEP,)),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), ("</tool_call>", "<|end_of_text|>"), _json,
                   frame=Frame("<|tool_call|>", "[", "]", between=", ")),
        ToolFormat("glm4", _XML[:1], _XML[1:], glm4,
                   inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
        ToolFormat(HARMONY, harmony.MARKERS, (), _harmony),
    )
}  # fmt: skip

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
    """The same for reasoning."""
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
