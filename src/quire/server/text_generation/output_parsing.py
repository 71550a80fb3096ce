"""How answers of the served model are read: the formats it speaks, and what one request makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import ConfigError
from quire.server.server_options import ServerOptions
from quire.text.messages.formats import GENERIC, ToolFormat, reasoning_format, tool_format
from quire.text.messages.ids import call_id
from quire.text.messages.parser import Parser
from quire.text.messages.reasoning import ReasoningFormat
from quire.text.messages.text_source import ParserRequest
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

TAIL = 16
"""Tokens at the end of a prompt, where a template that begins or ends reasoning says so."""


@dataclass(frozen=True, slots=True)
class Formats:
    """What the model speaks. `hidden`: markers that are special tokens; `shown`: their ids."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    hidden: frozenset[str] = frozenset()
    shown: frozenset[int] = frozenset()

    def forcing(self, forced: bool) -> Formats:
        """Formats for calls that are `forced`: where the model speaks no known format they are in one of ours."""
        return replace(self, tools=GENERIC) if forced and self.tools is None else self


def formats_of(options: ServerOptions, template: ChatTemplate | None, tokenizer: Tokenizer) -> Formats:
    """Formats by the options, else by the chat template. `ConfigError` for a name that no format has."""
    source = "" if template is None else template.source
    tools = tool_format(options.tool_call_parser, source)
    reasoning = reasoning_format(options.reasoning_parser, source)
    if tools is None and options.enable_auto_tool_choice:
        raise ConfigError(
            "--enable-auto-tool-choice: the chat template has no known format of tool calls; give --tool-call-parser",
            param="enable_auto_tool_choice",
        )
    markers = {*(tools.markers if tools else ()), *(reasoning.openers + reasoning.closers if reasoning else ())}
    special = {marker: tokenizer.special[marker] for marker in markers if marker in tokenizer.special}
    return Formats(tools, reasoning, frozenset(special), frozenset(special.values()))


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the answers to one request are read. `schemas`: parameters by functions, None = calls are not read.

    `inside`: see `inside_reasoning`. `choice`: the function that must be called, "" = any, None = none must.
    """

    formats: Formats
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    parallel: bool = True
    inside: bool | None = None
    choice: str | None = None

    @property
    def reads(self) -> bool:
        """Whether there may be more than content."""
        return self.formats.reasoning is not None or (self.formats.tools is not None and self.schemas is not None)

    def parser(self) -> Parser | None:
        """One for a choice; None where all is content."""
        formats = self.formats
        if not self.reads:
            return None
        ids = call_id if formats.tools is None else formats.tools.call_id
        reading = ParserRequest(ids, self.schemas, self.inside, formats.hidden)
        return Parser(formats.reasoning, formats.tools, reading)


def inside_reasoning(formats: Formats, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool | None:
    """Whether the prompt ends within reasoning (True) or behind it (False); None if it says nothing."""
    if formats.reasoning is None:
        return None
    tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(formats.reasoning.openers):
        return True
    return False if tail.endswith(formats.reasoning.closers) else None
