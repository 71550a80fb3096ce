"""Chat templates: messages to the text a model was trained on.

Templates run in processes of their own (`quire.text.template_renderer`). What messages contain is escaped before the
template sees it, so that only the template itself writes special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import BadRequest, ModelError
from quire.core.files import read_json, read_text
from quire.text.template_renderer import RENDERER, RenderError
from quire.text.tokenizer import CUT, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MODEL_LEN = 1 << 20
"""Of templates that are told none."""
MIN_CHARS = 1 << 16
"""What a template may always write."""
MAX_DEPTH = 64
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"})
"""Names that no other value of a template may have."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names a message's reasoning comes under; templates read the first, gpt-oss's the second."""
_END_MARK = "\ufdd1"
"""Where a message to be continued ends; a noncharacter, which no text contains."""

_TOLD = {
    "refused": "{error}",
    "undefined": "the chat template {name!r} misses a field: {error}",
    "security": "the chat template {name!r} does what is not allowed: {error}",
    "large": "{error}",
    "limit": "the chat template {name!r} stopped: {error}",
    "failed": "the chat template {name!r} fails on these messages: {error}",
}
"""What is said of each kind of `RenderError`."""

Message = Mapping[str, Any]
IMAGE_PART: Mapping[str, Any] = {"type": "image"}
"""An image among the parts of a message's content, as templates are told of it."""
_WORD = "wordofaprobe"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": _WORD, "description": _WORD, "parameters": {"type": "object", "properties": {}}},
}


class TemplateInput(NamedTuple):
    """Which contents of messages a template writes: one text; a list of parts, images among them."""

    texts: bool = True
    parts: bool = False


class ChatTemplate:
    """The chat template(s) of a model; `render` and `encode` may be called from any thread."""

    def __init__(
        self,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        origin: str = "chat template",
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self._tokenizer = tokenizer
        self._sources = dict(sources)
        self._max_chars = max(MIN_CHARS, 4 * max_model_len)
        for name, source in sources.items():
            try:
                RENDERER.compile(source)
            except RenderError as error:
                raise ModelError(f"{origin}: template {name!r} does not compile: {error}") from None

    @property
    def source(self) -> str:
        """What the templates say, one after the other."""
        return "\n".join(self._sources.values())

    def mentions(self, variable: str) -> bool:
        """Whether a template can act on `variable`."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        tokenizer: Tokenizer,
        override: str | Path | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> ChatTemplate | None:
        """The template in the file `override`, else that of `folder` (`read_templates`), else None.

        `folder` may be a GGUF file, which holds its templates itself: `tokenizer` is then to be the one it holds, too.
        """
        if override is not None:
            return cls({"default": read_text(Path(override))}, tokenizer, str(override), max_model_len)
        folder = Path(folder)
        if folder.is_file():
            held = tokenizer.templates
            return cls(held, tokenizer, f"{folder}: tokenizer.chat_template", max_model_len) if held else None
        sources, path = read_templates(folder)
        return cls(sources, tokenizer, str(path), max_model_len) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text, for showing: special tokens and forged ones look the same in it. See `encode`."""
        text = self.marked(messages, tools, add_generation_prompt, continue_final_message, **variables)
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
        text = self.marked(messages, tools, add_generation_prompt, continue_final_message, **variables)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        image_mark: str = "",
        **variables: Any,
    ) -> str:
        """What `encode` encodes: the text with marks in forged special tokens, which the tokenizer ignores.

        `image_mark`: what stands for an image where the template itself writes nothing for it; "" = there may be none.
        """
        if bad := RESERVED & variables.keys():
            raise BadRequest(f"chat_template_kwargs: {sorted(bad)[0]!r} cannot be set", param="chat_template_kwargs")
        chat = self._checked(messages, image_mark)
        if continue_final_message:
            if add_generation_prompt:
                raise BadRequest(
                    "continue_final_message excludes add_generation_prompt", param="continue_final_message"
                )
            chat[-1] = {**chat[-1], "content": _marked_end(chat[-1].get("content"))}
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise BadRequest(f"this model has no chat template named {name!r}", param="messages")
        values: dict[str, Any] = {
            **self._tokenizer.named,
            **{key: self._escaped(value) for key, value in variables.items()},
            "messages": chat,
            "tools": self._escaped(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(name, values)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, name: str, values: Mapping[str, Any]) -> str:
        """The text; `BadRequest` says what the template, by its name, did with these messages.

        It may write four characters for each position of the context and for each byte that it is given.
        """
        try:
            return RENDERER.render(self._sources[name], values, self._max_chars)
        except RenderError as error:
            told = _TOLD[error.kind].format(name=name, error=error)
            raise BadRequest(f"messages: {told}", param="messages") from None

    @cached_property
    def reads(self) -> TemplateInput:
        """Asked of the template itself, by what it writes of a user's message: some read texts alone, some lists."""
        if not self.mentions("image"):
            return TemplateInput()
        text, told = self._probe(_WORD), self._probe([{"type": "text", "text": _WORD}])
        seen = self._probe([IMAGE_PART, {"type": "text", "text": _WORD}])
        printed = "'type'" in seen or '"type"' in seen  # a list that is taken for a text
        return TemplateInput(_WORD in text, _WORD in seen and seen != told and not printed)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model is told of tools: what the template writes with a tool is not what it writes without. True
        where it writes nothing of a user's message alone, so that nothing is known."""
        if "tool_use" in self._sources:
            return True
        written = self._probe(_WORD, [_TOOL])
        return not written or written != self._probe(_WORD)

    def _probe(self, content: Any, tools: list[Any] | None = None) -> str:
        values = {**self._tokenizer.named, "messages": [{"role": "user", "content": content}], "tools": tools}
        try:
            return RENDERER.render(
                self._sources.get("default", ""), {**values, "add_generation_prompt": True}, self._max_chars
            )
        except RenderError:
            return ""

    def _checked(self, messages: Sequence[Message], image_mark: str) -> list[dict[str, Any]]:
        """Escaped copies of `messages`, their contents as the template reads them."""
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
                copy["content"] = self._content(_parts(copy["content"], i, bool(image_mark)), image_mark)
            reasoning = next((copy[name] for name in _REASONING if copy.get(name) is not None), None)
            if reasoning is not None:
                copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
            chat.append(copy)
        return chat

    def _content(self, parts: Sequence[str | None], image_mark: str) -> str | list[Mapping[str, Any]]:
        """Texts are joined by newlines, with images before them, unless the template reads lists of parts."""
        texts = [part for part in parts if part is not None]
        count = len(parts) - len(texts)
        if count and not self.reads.parts:
            return "\n".join([image_mark] * count + texts)
        if count or not self.reads.texts:
            return [IMAGE_PART if part is None else {"type": "text", "text": part} for part in parts]
        return "\n".join(texts)

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


def read_templates(folder: Path) -> tuple[dict[str, str], Path]:
    """The chat templates of a model folder by name, and the file of the default one.

    chat_template.jinja goes before chat_template.json (of processors), that before tokenizer_config.json.
    """
    path = folder / "chat_template.jinja"
    if path.exists() or path.is_symlink():
        more = {p.stem: read_text(p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return more | {"default": read_text(path)}, path
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = read_json(path).get("chat_template")
        if found is None:
            continue
        try:
            if isinstance(found, dict):
                found = [{"name": name, "template": text} for name, text in found.items()]
            sources = {"default": found} if isinstance(found, str) else {t["name"]: t["template"] for t in found}
        except (TypeError, KeyError):
            raise ModelError(f"{path}: chat_template must be a string or a list of {{name, template}}") from None
        return sources, path
    return {}, path


def _parts(content: Any, index: int, with_images: bool) -> list[str | None]:
    """A message's content as texts, and None for each image; that of a message which only calls tools is empty."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise BadRequest(f"messages[{index}].content: must be a string or a list of parts", param="messages")
    parts: list[str | None] = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif with_images and isinstance(part, dict) and part.get("type") == "image":
            parts.append(None)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"messages[{index}].content: parts of type {kind!r} are not supported by this model; "
                             "only text is", param="messages")  # fmt: skip
    return parts


def _marked_end(content: Any) -> Any:
    """The content of a message that is to be continued, with a mark where it ends."""
    if isinstance(content, list) and content and content[-1].get("text"):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK + " "}]
    if not content or isinstance(content, list):
        raise BadRequest("continue_final_message: the last message has no text", param="continue_final_message")
    return content + _END_MARK + " "


def _cut_at_mark(text: str) -> str:
    """The prompt up to the end of the final message, trimmed if the template trims its messages."""
    at = text.rfind(_END_MARK)
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template leaves out or changes the final message",
            param="continue_final_message",
        )
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()
