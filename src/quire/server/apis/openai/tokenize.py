"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.apis.openai.prompts import encode_chat, encode_texts
from quire.server.apis.openai.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from quire.server.apis.openai.replies import Text, Tokens
from quire.server.apis.openai.tools import check_tools
from quire.server.apis.unsupported import refuse_unbuilt
from quire.server.http.body import ID_BYTES, off_loop, off_read, read_struct
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
        refuse_unbuilt(body)
        await off_read(request, check_tools, body.tools or ())
        if body.add_special_tokens:
            raise BadRequest("add_special_tokens: the chat template already adds them", param="add_special_tokens")
        with service.media.hold() as held:
            ids = service.media.shown_of(await encode_chat(service, body, None, held))
    else:
        special = body.add_special_tokens is not False
        [ids] = await encode_texts(service, [body.prompt], special, None)

    def encoded() -> bytes:
        reply = Tokens(count=len(ids), max_model_len=service.engine.info.max_model_len, tokens=ids)
        if body.return_token_strs:
            reply.token_strs = [service.tokenizer.id_to_text(token) for token in ids]
        return msgspec.json.encode(reply)

    return JsonResponse(await off_loop(ID_BYTES * len(ids), encoded))


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await read_struct(request, service.options, lambda _: DetokenizeRequest)
    service.check_model(body.model)
    info, ids = service.engine.info, body.tokens

    def decoded() -> bytes:
        if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
            raise BadRequest(f"tokens: ids must lie in [0, {info.vocab_size}) for this model", param="tokens")
        return msgspec.json.encode(Text(prompt=service.tokenizer.decode(ids, False)))

    return JsonResponse(await off_loop(ID_BYTES * len(ids), decoded))


ROUTES = (
    Route("POST", "/tokenize", tokenize, body=(TokenizeText, TokenizeChat), reply=(Tokens,)),
    Route("POST", "/detokenize", detokenize, body=(DetokenizeRequest,), reply=(Text,)),
)
