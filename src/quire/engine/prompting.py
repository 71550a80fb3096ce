"""What callers of `LLM` give as prompts and conversations -> token ids and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.config import EngineConfig
from quire.core.errors import BadRequest
from quire.engine.client import EngineInfo
from quire.engine.requests import Encoded, check_size
from quire.engine.sources import Source, scheme_of, source_of
from quire.model.disk.tokenizer import model_tokenizer
from quire.text.template import PICTURE, ChatTemplate
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.pictures import Preparer
    from quire.pictures.prompt import Prepared

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
_FIELDS = {"prompt", "prompt_token_ids", "multi_modal_data"}


class PromptReader:
    """Reads prompts for a model, each of its tools when first needed."""

    def __init__(self, config: EngineConfig, info: EngineInfo) -> None:
        self._config, self._info = config, info

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's, or that of the `tokenizer` option."""
        return model_tokenizer(self._config.model, self._info.folder, self._info.vocab_size)

    @cached_property
    def template(self) -> ChatTemplate:
        """That of the model or of the `chat_template` option; `BadRequest` when there is none."""
        found = ChatTemplate.from_folder(
            self._info.folder, self.tokenizer, self._config.model.chat_template, self._info.max_model_len
        )
        if found is None:
            raise BadRequest(f"{self._info.folder} has no chat template; use generate, or give chat_template")
        return found

    @cached_property
    def preparer(self) -> Preparer:
        """Reads pictures."""
        from quire.engine.pictures import Preparer

        return Preparer(self._info, self._config.media, self.tokenizer)

    def read(self, prompt: Prompt) -> tuple[str | None, Encoded]:
        """The text of a prompt, None where ids were given, and its ids with its pictures."""
        if isinstance(prompt, str):
            check_size(self._info, self.tokenizer, prompt)
            return prompt, Encoded(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Mapping):
            return None, Encoded(prompt)
        text, ids = _fields(prompt)
        if isinstance(ids, Encoded):
            return text, ids
        pictures = _images(prompt.get("multi_modal_data"))
        if pictures:
            return text, self._seen(text, ids, pictures)
        return self.read(text or "") if ids is None else (text, Encoded(ids))

    def _seen(self, text: str | None, ids: Sequence[int] | None, sources: Sequence[Source]) -> Encoded:
        """A text with marks of pictures, or ids in which each has as many image tokens as it has rows."""
        preparer = self.preparer
        preparer.admit(sources)
        if text is not None and ids is None:
            preparer.check_marks(text, len(sources), "prompt")
            return preparer.encode(text, self._prepared(sources), "prompt", special=True)
        return preparer.place(list(ids or ()), self._prepared(sources), "prompt_token_ids")

    def _prepared(self, sources: Sequence[Source]) -> list[Prepared]:
        return [self.preparer.prepare(source, alone=len(sources) == 1) for source in sources]

    def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        **variables: Any,
    ) -> Prompt:
        """The prompt of a conversation, through the model's chat template or the text `chat_template`."""
        template = self.template if chat_template is None else ChatTemplate({"default": chat_template}, self.tokenizer)
        sources: list[Source] = []
        plain = [_plain(message, f"messages[{i}]", sources) for i, message in enumerate(messages)]
        if not sources:
            return {"prompt_token_ids": template.encode(plain, tools, **variables)}
        self.preparer.admit(sources)
        text = template.marked(plain, tools, picture=self.preparer.mark, **variables)
        self.preparer.check_marks(text, len(sources), "messages")
        return {"prompt_token_ids": self.preparer.encode(text, self._prepared(sources), "messages")}


def conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or several, as a list."""
    if not messages:
        raise BadRequest("messages: must not be empty", param="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _fields(prompt: Mapping[str, Any]) -> tuple[str | None, Sequence[int] | None]:
    """(text, token ids) of a prompt given as a dict; one may be None."""
    unknown = sorted(prompt.keys() - _FIELDS)
    if unknown or not prompt:
        raise BadRequest(f"prompt: need prompt or prompt_token_ids, not {unknown}", param="prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is None and not isinstance(text, str):
        raise BadRequest(f"prompt: a {type(text).__name__} is not a string", param="prompt")
    return text, ids


def _images(data: Any) -> list[Source]:
    """The pictures of vLLM's `multi_modal_data`: {"image": one or a list of them}."""
    if data is None:
        return []
    at = "multi_modal_data"
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise BadRequest(f'{at}: must be {{"image": ...}}; only pictures are read', param=at)
    given = data.get("image")
    images = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [Source(f"{at}.image[{i}]", _named(image)) for i, image in enumerate(images)]


def _named(given: Any) -> Any:
    """A text that is no URL is the path of a file."""
    return Path(given) if isinstance(given, str) and scheme_of(given) not in _SCHEMES else given


_SCHEMES = ("data", "file", "http", "https")


def _plain(message: Any, where: str, sources: list[Source]) -> Any:
    """A message without its pictures, which are added to `sources`; what is no message is refused by the template."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    parts = []
    for i, part in enumerate(message["content"]):
        source = _source(part, f"{where}.content[{i}]") if isinstance(part, Mapping) else None
        parts.append(part if source is None else PICTURE)
        sources += [] if source is None else [source]
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], at: str) -> Source | None:
    """The picture of a part: an object of the caller's ({"type": "image", "image": ...}), or as OpenAI has it."""
    if part.get("type") in ("image", "image_pil"):
        given = next((part[name] for name in ("image", "image_pil", "url", "path") if part.get(name) is not None), None)
        if given is None:
            raise BadRequest(f"{at}.image: required, a picture", param=f"{at}.image")
        return Source(f"{at}.image", _named(given))
    return source_of(part, at)
