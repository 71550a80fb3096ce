"""An answer as it comes: what of it is shown, and the message that the conversation keeps of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CalledTool:
    """A call of a tool as far as it has come; `arguments` is JSON."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """Whether all of the arguments have come."""
        try:
            return isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            return False


@dataclass
class Answer:
    """Content, thoughts and calls of tools of one answer. What `add_content`, `add_thought` and `end` return is shown:
    thoughts stand between <think> marks, calls at the end.
    """

    content: str = ""
    thoughts: str = ""
    calls: dict[int, CalledTool] = field(default_factory=dict)
    _thinking: bool = False

    def add_content(self, text: str) -> str:
        """Add text of the answer itself."""
        self.content += text
        return f"{self._end_thoughts()}{text}" if text else ""

    def add_thought(self, text: str) -> str:
        """Add text of the reasoning."""
        self.thoughts += text
        begin = "" if self._thinking or not text else "<think>\n"
        self._thinking = self._thinking or bool(text)
        return begin + text

    def add_call(self, index: int, id: str, name: str, arguments: str) -> None:
        """Add parts of a call."""
        call = self.calls.setdefault(index, CalledTool())
        call.id, call.name, call.arguments = call.id or id, call.name + name, call.arguments + arguments

    def end(self) -> str:
        """The end of thoughts that nothing followed, and the calls."""
        shown = [f"\n`{call.name}({call.arguments})`\n" for call in self.calls.values()]
        return self._end_thoughts() + "".join(shown)

    def _end_thoughts(self) -> str:
        ends, self._thinking = self._thinking, False
        return "\n</think>\n" if ends else ""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as OpenAI's API has messages. A call that broke off is left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        calls = [call for call in self.calls.values() if call.name and call.whole]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments or "{}"},
                }
                for number, call in enumerate(calls)
            ]
        return message
