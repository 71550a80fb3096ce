"""What an assistant said, in the shapes of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.api.replies import ChatDelta, ChatMessage, FunctionPart, ToolCallPart
from quire.server.assistant import Message
from quire.text.messages.source import Delta

ROLE = "assistant"


def delta_of(deltas: Sequence[Delta], reasons: bool) -> ChatDelta:
    """One chunk's; a call's start and its first arguments in it are one part. `reasons`: reasoning is shown."""
    out = ChatDelta()
    calls: dict[int, ToolCallPart] = {}
    for delta in deltas:
        if delta.kind == "content":
            out.content = (out.content or "") + delta.text
        elif delta.kind == "reasoning":
            if reasons:
                out.reasoning_content = (out.reasoning_content or "") + delta.text
        elif delta.kind == "call":
            function = FunctionPart(name=delta.name, arguments="")
            calls[delta.index] = ToolCallPart(index=delta.index, id=delta.id, type="function", function=function)
        else:
            part = calls.setdefault(delta.index, ToolCallPart(index=delta.index, function=FunctionPart(arguments="")))
            part.function.arguments += delta.text
    if calls:
        out.tool_calls = list(calls.values())
    return out


def message_of(said: Message, reasons: bool) -> ChatMessage:
    """A whole message."""
    empty = not said.content and (said.calls or said.reasoning)
    message = ChatMessage(role=ROLE, content=None if empty else said.content)
    if said.reasoning and reasons:
        message.reasoning_content = said.reasoning
    if said.calls:
        message.tool_calls = [
            ToolCallPart(id=call.id, type="function", function=FunctionPart(name=call.name, arguments=call.arguments))
            for call in said.calls
        ]
    return message
