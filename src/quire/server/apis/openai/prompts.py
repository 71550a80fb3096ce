"""What clients send as a prompt -> token ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from quire.core.errors import BadRequest
from quire.core.request import longest_prompt
from quire.engine.requests import EncodedPrompt, check_size, check_tokens
from quire.features.images.edge_image_sources import ImageSource, forget, source_of
from quire.server.apis.openai.protocol import ChatBody, ChatCompletionRequest, Message, Prompt
from quire.server.apis.openai.tools import effort_kwargs, history_calls
from quire.server.apis.unsupported import refuse_unbuilt
from quire.server.http.body import LARGE, off_loop
from quire.server.http.errors import brief
from quire.server.service import Service
from quire.server.text_generation.media import ImageBytes
from quire.text.messages.ids import shorten
from quire.text.shortening import shortened
from quire.text.template import IMAGE_PART, RESERVED
from quire.text.template_renderer import PROCESSES
from quire.text.tokenizer import CUT

OF_REQUEST = RESERVED | {"continue_final_message", "image_mark", "documents", "self"}
"""What `chat_template_kwargs` may not set: what a request has fields for, or may not have. Templates are rendered where
nothing else can be reached, so that any other value is theirs alone."""
MAX_KWARGS = 16 << 10
"""Bytes of all that it sets, as JSON."""

MAX_TOKENS = 1 << 18
"""Of a text that need not fit the model: one to be cut, or to be counted alone."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LISTED = ", ".join(sorted(OF_REQUEST))
_CALL = 256  # bytes of text that take as long as a call of the tokenizer
# Large texts wait for one of few threads: the engine needs the cores, and other work a thread.
_ENCODING = ThreadPoolExecutor(2, "quire-encode")
_RENDERING = ThreadPoolExecutor(PROCESSES, "quire-render")


Prompts = list[str] | list[list[int]]


def listed(service: Service, prompt: Prompt, param: str = "prompt") -> Prompts:
    """What came as the field `param`: one or many prompts, as texts or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest(f"{param}: must not be empty", param=param)
    if len(prompt) > service.engine.info.max_num_queued_reqs and not isinstance(prompt[0], int):
        raise BadRequest(f"{param}: a list of {len(prompt)} prompts is longer than this server's queue", param=param)
    given: list[Any] = prompt
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return given
    raise BadRequest(f"{param}: a list must hold only strings, only token ids, or only lists of token ids", param=param)


async def encode_prompts(
    service: Service, prompts: Prompts, add_special_tokens: bool, param: str | None
) -> list[list[int]]:
    """Token ids of prompts; see `encode_texts`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return await encode_texts(service, texts, add_special_tokens, param)
    return [prompt for prompt in prompts if not isinstance(prompt, str)]


async def encode_texts(
    service: Service, texts: Sequence[str], add_special_tokens: bool, param: str | None
) -> list[list[int]]:
    """Token ids of texts that came as the field `param`, each refused that cannot fit the model; None: all may be."""

    def encode() -> list[list[int]]:
        for text in texts:
            if param is not None:
                check_size(service.engine.info, service.tokenizer, text, param)
            else:
                check_tokens(service.tokenizer, text, _most_tokens(service))
        return [service.tokenizer.encode(text, add_special_tokens) for text in texts]

    if service.tokenizer.work(sum(_CALL + len(text) for text in texts)) <= LARGE:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_ENCODING, encode)


async def encode_pairs(
    service: Service, pairs: Sequence[tuple[str, str]], keep: int | None, last: bool = False
) -> list[tuple[list[int], int]]:
    """What `Tokenizer.encode_pair` makes of pairs, of at most `keep` tokens; -1 = of as many as the model reads.

    `last`: texts keep their ends, not their beginnings.
    """
    most = 0 if keep is None else kept_tokens(keep, service.engine.info.max_model_len)

    def encode() -> list[tuple[list[int], int]]:
        for pair in pairs:
            for text in pair:
                check_tokens(service.tokenizer, text, _most_tokens(service))
        return [service.tokenizer.encode_pair(*pair, most, last) for pair in pairs]

    return await off_loop(service.tokenizer.work(sum(_CALL + len(a) + len(b) for a, b in pairs)), encode)


def kept_tokens(keep: int, limit: int) -> int:
    """Tokens that `truncate_prompt_tokens` leaves of what a vector is made of; -1 = as many as the model reads."""
    if keep != -1 and not 1 <= keep <= limit:
        raise BadRequest(f"truncate_prompt_tokens: must be -1 or lie in [1, {limit}]", param="truncate_prompt_tokens")
    return limit if keep == -1 else keep


async def encode_shortened(
    service: Service, prompts: Prompts, limit: int, last: bool = False, special: bool = True
) -> list[list[int]]:
    """Token ids of prompts, at most `limit` each: the first of them, or the `last`. Special tokens of texts stay, which
    they have if `special`."""
    found = await encode_prompts(service, prompts, special, None)
    given: list[Any] = [*prompts]
    for i, (prompt, ids) in enumerate(zip(given, found, strict=True)):
        if len(ids) > limit:
            work = service.tokenizer.work(len(prompt)) if isinstance(prompt, str) else 0
            found[i] = await off_loop(work, shortened, service.tokenizer, prompt, ids, limit, last)
    return found


async def shortened_texts(service: Service, texts: Sequence[str], most: int) -> list[str]:
    """The beginnings of texts, of at most `most` tokens each."""

    def beginning(text: str) -> str:
        check_tokens(service.tokenizer, text, _most_tokens(service))
        places = service.tokenizer.offsets(text, add_special_tokens=False)
        return text[: places[most]] if most < len(places) else text

    def all_shortened() -> list[str]:
        return [beginning(text) for text in texts]

    return await off_loop(service.tokenizer.work(sum(_CALL + len(text) for text in texts)), all_shortened)


def truncate(ids: list[int], keep: int | None, limit: int) -> list[int]:
    """The last `keep` tokens of a prompt; -1 = as many as the context holds beside one new token."""
    if keep is None:
        return ids
    most = kept_tokens(keep, limit)
    return ids[-(longest_prompt(limit) if keep == -1 else most) :]


def cut(prompt: EncodedPrompt, keep: int | None, limit: int) -> EncodedPrompt:
    """Cut a prompt that may have images, which stay whole."""
    ids = truncate(list(prompt.ids), keep, limit)
    if prompt.images and len(ids) < len(prompt.ids):
        raise BadRequest(
            f"truncate_prompt_tokens: a prompt with images is not cut, and this one has {len(prompt.ids)} tokens",
            param="truncate_prompt_tokens",
        )
    return EncodedPrompt(ids, prompt.images)


async def encode_with_images(
    service: Service,
    text: str,
    sources: Sequence[ImageSource],
    held: ImageBytes,
    param: str | None,
    special: bool = False,
) -> EncodedPrompt:
    """Token ids of a text that has a mark for each image. `special`: with what the tokenizer puts around texts."""
    service.media.check_marks(text, len(sources), param or "messages")
    prepared = await service.media.prepared(sources, held)
    work = partial(service.media.encode, text, prepared, param, special)
    return await asyncio.get_running_loop().run_in_executor(_ENCODING, work)


async def encode_chat(service: Service, body: ChatBody, param: str | None, held: ImageBytes) -> EncodedPrompt:
    """Messages through the model's template; strings in them can never become special tokens.

    `param`: as for `encode_texts`. `held` counts the images in them.
    """
    if service.template is None:
        raise BadRequest("messages: this model has no chat template; use /v1/completions", param="messages")
    if not body.messages:
        raise BadRequest("messages: must not be empty", param="messages")
    # In a thread whatever its size: the template may use up its time.
    limit = service.engine.info.max_model_len if param is not None else _most_tokens(service)
    text, sources = await asyncio.get_running_loop().run_in_executor(_RENDERING, _rendered, service, body, limit)
    if sources:
        return await encode_with_images(service, text, sources, held, param)
    return EncodedPrompt((await encode_texts(service, [text], False, param))[0])


async def render_chat(service: Service, body: ChatBody) -> str:
    """The text of a conversation, for showing."""
    if service.template is None:
        raise BadRequest("messages: this model has no chat template", param="messages")
    run = asyncio.get_running_loop().run_in_executor
    text, _ = await run(_RENDERING, _rendered, service, body, _most_tokens(service))
    return text.replace(CUT, "")


def _most_tokens(service: Service) -> int:
    return max(MAX_TOKENS, service.engine.info.max_model_len)


def _rendered(service: Service, body: ChatBody, limit: int) -> tuple[str, list[ImageSource]]:
    """The text of a conversation, and the images whose marks are in it; far more than `limit` tokens are refused."""
    assert service.template is not None
    texts = list(_texts(body.messages))
    if sum(map(len, texts)) > 4 * limit:
        check_tokens(service.tokenizer, "".join(texts), limit, "messages")
    as_text = service.formats.tools is not None and service.formats.tools.text_arguments
    sources: list[ImageSource] = []
    messages = [_plain(message, f"messages[{i}]", as_text, sources) for i, message in enumerate(body.messages)]
    if service.formats.tools is not None and service.formats.tools.short_ids:
        shorten(messages)
    service.media.admit(sources)
    continued = bool(body.continue_final_message)
    generate = body.add_generation_prompt
    if continued and generate:
        raise BadRequest(
            "continue_final_message: excludes add_generation_prompt; set that to false", param="continue_final_message"
        )
    kwargs = _template_kwargs(service, body.chat_template_kwargs or {})
    tools = body.tools
    if isinstance(body, ChatCompletionRequest):
        kwargs = effort_kwargs(service, body.reasoning_effort) | kwargs
        tools = None if body.tool_choice == "none" else tools
    text = service.template.marked(
        messages,
        tools,
        add_generation_prompt=not continued if generate is None else generate,
        continue_final_message=continued,
        image_mark=service.media.mark if sources else "",
        **kwargs,
    )
    return text, sources


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    """What is said in them."""
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part.get("text"), str):
                yield part["text"]


def _plain(message: Message, where: str, as_text: bool, sources: list[ImageSource]) -> dict[str, Any]:
    """A message as the template sees it: only what was given. `as_text`: arguments of calls are JSON in a string.

    Images leave it for `sources`.
    """
    refuse_unbuilt(message, where=f"{where}.")
    if message.tool_calls and message.role != "assistant":
        raise BadRequest(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise BadRequest(f"{where}.tool_call_id: only for the role 'tool'", param=f"{where}.tool_call_id")
    if message.content is None and not message.tool_calls and message.reasoning_content is None:
        raise BadRequest(f"{where}.content: required", param=f"{where}.content")
    fields = msgspec.structs.asdict(message)
    names = ("role", "content", "name", "reasoning_content", "tool_call_id")
    plain = {name: fields[name] for name in names if fields[name] is not None}
    if message.content is None:
        plain["content"] = ""
    elif not isinstance(message.content, str):
        plain["content"] = _parts(message.content, f"{where}.content", sources)
    if message.tool_calls:
        plain["tool_calls"] = history_calls(message, where, as_text)
    return plain


def _parts(content: Sequence[dict[str, Any]], where: str, sources: list[ImageSource]) -> list[Any]:
    parts: list[Any] = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        source = source_of(part, at)
        if source is not None:
            sources.append(source)
            forget(part)
            parts.append(IMAGE_PART)
        elif part.get("type") != "text":
            raise BadRequest(
                f"{at}.type: only parts of type 'text' and 'image_url' are read, not {brief(part.get('type'))}",
                param=f"{at}.type",
            )
        elif not isinstance(part.get("text"), str):
            raise BadRequest(f"{at}.text: required, a string", param=f"{at}.text")
        else:
            parts.append(part)
    return parts


def details_of(messages: Sequence[Message]) -> list[str]:
    """Fields of images that ask for a size of their own: the model's files say what becomes of them."""
    found = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            image = part.get("image_url")
            if isinstance(image, dict) and image.get("detail") not in (None, "auto"):
                found.append(f"messages[{i}].content[{j}].image_url.detail")
    return found


def _template_kwargs(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    if given and (size := len(msgspec.json.encode(given))) > MAX_KWARGS:
        raise BadRequest(f"chat_template_kwargs: {size} bytes are more than {MAX_KWARGS}", param="chat_template_kwargs")
    for name in given:
        at = f"chat_template_kwargs.{name[:100]}"
        if name in OF_REQUEST or not _WORD.fullmatch(name):
            raise BadRequest(f"{at}: may not be set; names are words, and none of {_LISTED}", param=at)
        if service.template is not None and not service.template.mentions(name):
            raise BadRequest(f"{at}: this model's chat template does not use it", param=at)
    return given
