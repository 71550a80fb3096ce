"""A conversation: its messages, sampling settings, tools and images, and the file that keeps them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import BadRequest, ConfigError
from quire.core.files import read_bounded, write_whole

ASKING = ("user", "tool")
"""Roles of messages that the model answers."""
MAX_FILE = 64 << 20
"""Bytes of a conversation, an image or a file of tools that are read at most."""
FORMAT = "quire chat"
"""What a file of a conversation says that it is: `/save` overwrites no other file."""
IMAGE_TYPES = {
    b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp",
    b"BM": "image/bmp",
}  # fmt: skip
"""First bytes of image files, and their media types."""

SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
"""What `/set` takes, each a field of `SamplingParams` and of a request to a server."""
OTHER_NAMES = {
    "num_predict": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty",
    "temp": "temperature",
}  # fmt: skip
"""Names that Ollama and llama.cpp have for them."""

LOADED = {"num_ctx": "-c TOKENS", "n_ctx": "-c TOKENS", "num_thread": "-t THREADS", "num_gpu": "--device cuda"}
"""Names of others for what a model is loaded with, and our flags."""


class _SavedChat(msgspec.Struct, kw_only=True):
    """The file of a conversation."""

    messages: list[dict[str, Any]]
    format: str = ""
    model: str = ""
    settings: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


@dataclass
class Conversation:
    """`messages` as OpenAI's API has them, the system message first where there is one.

    `images`: data: URLs that the next message takes along.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    @property
    def system(self) -> str:
        """The system message; "" where there is none."""
        return str(self.messages[0]["content"]) if self._kept else ""

    @system.setter
    def system(self, text: str) -> None:
        """Set the system message; "" takes it away."""
        self.messages[: self._kept] = [{"role": "system", "content": text}] if text else []

    @property
    def _kept(self) -> int:
        """Number of messages that no limit and no command but /system takes away: the system message."""
        return int(bool(self.messages) and self.messages[0].get("role") == "system")

    @property
    def open_call(self) -> dict[str, Any] | None:
        """The first call of a tool in the last answer that has no result yet."""
        for results, message in enumerate(reversed(self.messages)):
            if message["role"] != "tool":
                calls: list[dict[str, Any]] = message.get("tool_calls") or []
                return calls[results] if results < len(calls) else None
        return None

    def ask(self, text: str) -> None:
        """Add the result of a call that has none, else a message of the user's with the images that wait for it."""
        call = self.open_call
        if call is not None:
            name = call["function"]["name"]
            self.messages.append({"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": text})
            return
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images = []
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})

    def unask(self) -> None:
        """Take the last question, or the last result of a call, away, which had no answer."""
        if self.messages and self.messages[-1]["role"] in ASKING:
            self.messages.pop()

    def clear(self) -> None:
        """Forget all but the system message, the settings and the tools."""
        del self.messages[self._kept :]
        self.images = []

    def drop_oldest(self) -> bool:
        """Forget the oldest question and its answer; False where there is but one question."""
        later = range(self._kept + 1, len(self.messages))
        second = next((i for i in later if self.messages[i]["role"] == "user"), None)
        if second is None:
            return False
        del self.messages[self._kept : second]
        return True

    def retry(self) -> None:
        """Take the last answer away, with results of its calls; `BadRequest` where nothing was asked."""
        while self.open_call is not None and self.messages[-1]["role"] == "tool":
            self.messages.pop()
        while self.messages and self.messages[-1]["role"] not in (*ASKING, "system"):
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] == "system":
            raise BadRequest("there is nothing to ask again")

    def for_server(self) -> list[dict[str, Any]]:
        """The messages as a server takes them: without thoughts, which some refuse."""
        return [{name: value for name, value in each.items() if name != "reasoning_content"} for each in self.messages]

    def for_template(self, as_text: bool) -> list[dict[str, Any]]:
        """The messages as a chat template takes them: arguments of calls as objects, unless `as_text`."""
        return self.messages if as_text else [_with_objects(each) for each in self.messages]

    def set(self, name: str, text: str) -> None:
        """Change a setting to what `text` says; `default` gives it back to the model. `BadRequest` names the fault."""
        from quire.core.options.values import did_you_mean

        name = OTHER_NAMES.get(name.replace("-", "_"), name.replace("-", "_"))
        if name in LOADED:
            raise BadRequest(f"{name}: is decided when the model is loaded; leave, and give quire run {LOADED[name]}")
        if name not in SETTINGS:
            raise BadRequest(f"{name}: there is no such setting{did_you_mean(name, SETTINGS)}")
        if text == "default":
            self.settings.pop(name, None)
            return
        try:
            value = SETTINGS[name](text)
        except ValueError:
            raise BadRequest(
                f"{name}: {text!r} is not {'an integer' if SETTINGS[name] is int else 'a number'}"
            ) from None
        check_settings({name: value})
        self.settings[name] = value

    def attach(self, path: str) -> None:
        """Have the next message take the image at `path` along; `ConfigError` where it is none."""
        data = _read(path)
        kind = next((kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)), None)
        if kind is None:
            raise ConfigError(f"{path}: is no image that quire reads (PNG, JPEG, WebP, GIF or BMP)")
        self.images.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")

    def use_tools(self, path: str) -> None:
        """Offer the model the tools of a JSON file: a list as OpenAI's API takes it, or its functions alone."""
        try:
            found = json.loads(_read(path))
        except ValueError as error:
            raise ConfigError(f"{path}: is not JSON: {error}") from None
        found = found.get("tools", [found]) if isinstance(found, dict) else found
        tools = [
            each if "function" in each else {"type": "function", "function": each} for each in _objects(path, found)
        ]
        if not all(isinstance(each["function"], dict) and each["function"].get("name") for each in tools):
            raise ConfigError(f"{path}: each tool needs a function with a name, as OpenAI's API takes it")
        self.tools = tools

    def save(self, path: str, model: str) -> None:
        """Write a file that `load` reads; `ConfigError` where another file is there or it cannot be written."""
        target = Path(path).expanduser()
        if target.exists() and _saved(path).format != FORMAT:
            raise ConfigError(f"{path}: is there and no conversation of quire's; name another file")
        saved = _SavedChat(format=FORMAT, model=model, messages=self.messages, settings=self.settings, tools=self.tools)
        try:
            write_whole(target, msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None

    def load(self, path: str) -> None:
        """Go on with the conversation of a file: one that `save` wrote, or a list of messages of OpenAI's API."""
        found = _saved(path)
        if not all(isinstance(each.get("role"), str) and "content" in each for each in found.messages):
            raise ConfigError(f"{path}: each message needs a role and a content")
        if not all(map(_is_call, chain.from_iterable(each.get("tool_calls") or () for each in found.messages))):
            raise ConfigError(f"{path}: each tool call needs a function with a name and arguments in JSON")
        settings = {name: value for name, value in found.settings.items() if name in SETTINGS}
        check_settings(settings)
        self.messages, self.settings, self.tools, self.images = found.messages, settings, found.tools, []


def _is_call(call: Any) -> bool:
    """Whether a call of a message is as `Answer.message` writes it."""
    try:
        return isinstance(call["function"]["name"], str) and isinstance(json.loads(call["function"]["arguments"]), dict)
    except (TypeError, KeyError, ValueError):
        return False


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [each["function"] | {"arguments": json.loads(each["function"]["arguments"])} for each in calls]
    return message | {"tool_calls": [call | {"function": f} for call, f in zip(calls, functions, strict=True)]}


def check_settings(settings: dict[str, Any]) -> None:
    """`BadRequest` for a setting that is out of range."""
    from quire.core.params import SamplingParams

    try:
        SamplingParams(**settings).validate(vocab_size=1 << 31)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


def _saved(path: str) -> _SavedChat:
    data = _read(path)
    try:
        if data.lstrip().startswith(b"["):
            return _SavedChat(messages=msgspec.json.decode(data, type=list[dict[str, Any]]))
        return msgspec.json.decode(data, type=_SavedChat)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no conversation: {error}") from None


def _objects(path: str, found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{path}: must hold a list of tools, as OpenAI's API takes it")
    return found


def _read(path: str) -> bytes:
    try:
        return read_bounded(Path(path).expanduser(), MAX_FILE)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
