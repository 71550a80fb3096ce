"""Chat templates: messages to the text a model was trained on.

What messages contain is escaped before the template sees it, so that only the template itself writes special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import TemplateError

from quire.core.errors import BadRequest, ModelError
from quire.gguf.file import GgufFile
from quire.gguf.vocab import chat_templates
from quire.text.files import read_json, read_text
from quire.text.sandbox import LimitExceeded, Sandbox
from quire.text.tokenizer import CUT, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHARS = 16 * 2**20
MAX_DEPTH = 64
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names a message's reasoning comes under; templates read the first, gpt-oss's the second."""
_END_MARK = "\ufdd1"
"""Where a message to be continued ends; a noncharacter, which no text contains."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template(s) of a model; `render` and `encode` may be called from any thread."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer, origin: str = "chat template") -> None:
        self._tokenizer = tokenizer
        self._sandbox = Sandbox()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = self._sandbox.bounded(source)
            except (TemplateError, RecursionError) as error:
                raise ModelError(f"{origin}: template {name!r} does not compile: {error}") from None
        self._origin = origin

    @classmethod
    def from_folder(
        cls, folder: str | Path, tokenizer: Tokenizer, override: str | Path | None = None
    ) -> ChatTemplate | None:
        """The template in the file `override`, else chat_template.jinja, else in tokenizer_config.json, else None.

        `folder` may be a GGUF file, which holds its templates itself.
        """
        if override is not None:
            return cls({"default": read_text(Path(override))}, tokenizer, str(override))
        folder = Path(folder)
        if folder.is_file():
            held = chat_templates(GgufFile(folder))
            return cls(held, tokenizer, f"{folder}: tokenizer.chat_template") if held else None
        path = folder / "chat_template.jinja"
        if path.exists():
            more = {p.stem: read_text(p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
            return cls(more | {"default": read_text(path)}, tokenizer, str(path))
        path = folder / "tokenizer_config.json"
        found = read_json(path).get("chat_template")
        if found is None:
            return None
        try:
            sources = {"default": found} if isinstance(found, str) else {t["name"]: t["template"] for t in found}
        except (TypeError, KeyError):
            raise ModelError(f"{path}: chat_template must be a string or a list of {{name, template}}") from None
        return cls(sources, tokenizer, str(path))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text, for showing: special tokens and forged ones look the same in it. See `encode`."""
        text = self._render(messages, tools, add_generation_prompt, continue_final_message, variables)
        return text.replace(CUT, "")

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the prompt. `variables` are passed to the template (`enable_thinking=False`).

        `BadRequest` for messages that are malformed or that the template refuses, `ModelError` for a broken template.
        """
        text = self._render(messages, tools, add_generation_prompt, continue_final_message, variables)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if bad := _RESERVED & variables.keys():
            raise BadRequest(f"chat_template_kwargs: {sorted(bad)[0]!r} cannot be set", param="chat_template_kwargs")
        chat = self._checked(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise BadRequest(
                    "continue_final_message excludes add_generation_prompt", param="continue_final_message"
                )
            if not chat[-1].get("content"):
                raise BadRequest("continue_final_message: the last message has no text", param="continue_final_message")
            chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _END_MARK + " "}
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRequest(f"{self._origin} has no template named {name!r}", param="messages")
        values: dict[str, Any] = {
            **self._tokenizer.named,
            **{key: self._escaped(value) for key, value in variables.items()},
            "messages": chat,
            "tools": self._escaped(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._templates[name], values)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render, and tell the caller's mistakes (the template raised on purpose) from the template's own."""
        try:
            return self._sandbox.render(template, values, MAX_CHARS)
        except LimitExceeded as error:
            raise BadRequest(f"messages: the chat template stopped: {error}", param="messages") from None
        except jinja2.UndefinedError as error:
            raise BadRequest(f"messages: the chat template misses a field: {error}", param="messages") from None
        except jinja2.exceptions.SecurityError as error:
            raise ModelError(f"{self._origin}: the template does what is not allowed: {error}") from None
        except TemplateError as error:
            raise BadRequest(f"messages: {error}", param="messages") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ModelError(f"{self._origin}: the template fails on these messages: {error!r}") from None

    def _checked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Escaped copies of `messages`; content given as text parts becomes one string, joined by newlines."""
        if not messages:
            raise BadRequest("messages: must not be empty", param="messages")
        chat = []
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise BadRequest(f"messages[{i}]: must be an object", param="messages")
            if message.get("role") not in ROLES:
                raise BadRequest(f"messages[{i}].role: must be one of {', '.join(ROLES)}", param="messages")
            copy = self._escaped(message)
            if "content" in message:
                copy["content"] = _text(copy["content"], i)
            reasoning = next((copy[name] for name in _REASONING if copy.get(name) is not None), None)
            if reasoning is not None:
                copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
            chat.append(copy)
        return chat

    def _escaped(self, value: Any, depth: int = 0) -> Any:
        """A copy of `value` in plain JSON types whose strings contain no special tokens."""
        if isinstance(value, str):
            return self._tokenizer.escape(str(value).replace(_END_MARK, "\ufffd"))
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if depth > MAX_DEPTH:
            raise BadRequest(f"messages: nested more than {MAX_DEPTH} levels deep", param="messages")
        if isinstance(value, Mapping):
            return {self._escaped(str(k)): self._escaped(v, depth + 1) for k, v in value.items()}
        if isinstance(value, Sequence):
            return [self._escaped(v, depth + 1) for v in value]
        raise BadRequest(f"messages: a {type(value).__name__} is not JSON", param="messages")


def _text(content: Any, index: int) -> str:
    """A message's content as one string; that of a message which only calls tools is None and counts as empty."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"messages[{index}].content: must be a string or a list of parts", param="messages")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"messages[{index}].content: parts of type {kind!r} are not supported by this model; "
                             "only text is", param="messages")  # fmt: skip
    return "\n".join(parts)


def _cut_at_mark(text: str) -> str:
    """The prompt up to the end of the final message, trimmed if the template trims its messages."""
    at = text.rfind(_END_MARK)
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template leaves out or changes the final message",
            param="continue_final_message",
        )
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()
