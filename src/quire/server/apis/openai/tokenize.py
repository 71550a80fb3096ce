"""POST /tokenize, /detokenize and /apply-template, in vLLM's and llama.cpp's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.apis.openai.prompts import encode_chat, encode_texts, render_chat
from quire.server.apis.openai.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from quire.server.apis.openai.replies import Prompt, Text, Tokens
from quire.server.apis.openai.tools import check_tools
from quire.server.apis.unsupported import refuse_unbuilt
from quire.server.http.body import ID_BYTES, off_loop, off_read, read_struct
from quire.server.http.dialects import LLAMA_CPP
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.service import Service


def _kind(value: Any) -> type[TokenizeText] | type[TokenizeChat]:
    chat = isinstance(value, dict) and value.get("messages") is not None
    return TokenizeChat if chat else TokenizeText


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text or of chat messages."""
    body: TokenizeText | TokenizeChat = await read_struct(request, service.options, _kind)
    service.check_model(body.model)
    if isinstance(body, TokenizeChat):
        await _check_chat(request, body)
        with service.media.hold() as held:
            ids = service.media.shown_of(await encode_chat(service, body, None, held))
    else:
        text, special = _text_of(body)
        [ids] = await encode_texts(service, [text], special, None)

    def encoded() -> bytes:
        reply = Tokens(count=len(ids), max_model_len=service.engine.info.max_model_len, tokens=ids)
        if body.return_token_strs:
            reply.token_strs = [service.tokenizer.id_to_text(token) for token in ids]
        return msgspec.json.encode(reply)

    return JsonResponse(await off_loop(ID_BYTES * len(ids), encoded))


async def _check_chat(request: Request, body: TokenizeChat) -> None:
    refuse_unbuilt(body)
    await off_read(request, check_tools, body.tools or ())
    if body.add_special_tokens:
        raise BadRequest("add_special_tokens: the chat template already adds them", param="add_special_tokens")


def _text_of(body: TokenizeText) -> tuple[str, bool]:
    """The text, and whether special tokens are added to it."""
    if body.content is None:
        if body.prompt is None:
            raise BadRequest("prompt: required, and missing", param="prompt")
        if body.add_special is not None:
            raise BadRequest("add_special: is about content; give add_special_tokens", param="add_special")
        return body.prompt, body.add_special_tokens is not False
    for name in ("prompt", "add_special_tokens"):
        if getattr(body, name) is not None:
            raise BadRequest(f"{name}: content is the text, with add_special; leave {name} out", param=name)
    return body.content, body.add_special is True


async def apply_template(service: Service, request: Request) -> Response:
    """Return the prompt that the chat template makes of messages, without running it."""
    body = await read_struct(request, service.options, lambda _: TokenizeChat)
    service.check_model(body.model)
    await _check_chat(request, body)
    return JsonResponse(msgspec.json.encode(Prompt(prompt=await render_chat(service, body))))


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await read_struct(request, service.options, lambda _: DetokenizeRequest)
    service.check_model(body.model)
    info, ids = service.engine.info, body.tokens

    def decoded() -> bytes:
        if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
            raise BadRequest(f"tokens: ids must lie in [0, {info.vocab_size}) for this model", param="tokens")
        text = service.tokenizer.decode(ids, False)
        return msgspec.json.encode(Text(prompt=text, content=text))

    return JsonResponse(await off_loop(ID_BYTES * len(ids), decoded))


ROUTES = (
    Route("POST", "/tokenize", tokenize, body=(TokenizeText, TokenizeChat), reply=(Tokens,)),
    Route("POST", "/detokenize", detokenize, body=(DetokenizeRequest,), reply=(Text,)),
    Route("POST", "/apply-template", apply_template, body=(TokenizeChat,), reply=(Prompt,), dialect=LLAMA_CPP),
)
