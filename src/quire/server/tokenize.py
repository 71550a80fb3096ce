"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.body import off_loop, read_bytes, read_json, read_struct, shaped
from quire.server.prompts import encode_chat, encode_texts
from quire.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from quire.server.replies import Tokens
from quire.server.service import Service
from quire.server.unbuilt import refuse_unbuilt


def _parse(data: bytes) -> TokenizeText | TokenizeChat:
    value = read_json(data)
    chat = isinstance(value, dict) and value.get("messages") is not None
    return shaped(value, TokenizeChat) if chat else shaped(value, TokenizeText)


async def tokenize(service: Service, request: Request) -> Response:
    """A text, or chat messages, as token ids."""
    options = service.options
    data = await read_bytes(request, limit=options.max_body_bytes, timeout=options.body_timeout)
    body = await off_loop(len(data), _parse, data)
    service.check_model(body.model)
    if isinstance(body, TokenizeChat):
        refuse_unbuilt(body)
        if body.add_special_tokens:
            raise BadRequest("add_special_tokens: the chat template already adds them", param="add_special_tokens")
        ids = await encode_chat(service, body, None)
    else:
        special = body.add_special_tokens is not False
        [ids] = await encode_texts(service, [body.prompt], special, None)

    def encoded() -> bytes:
        reply = Tokens(count=len(ids), max_model_len=service.engine.info.max_model_len, tokens=ids)
        if body.return_token_strs:
            reply.token_strs = [service.tokenizer.id_to_text(token) for token in ids]
        return msgspec.json.encode(reply)

    return Response(await off_loop(4 * len(ids), encoded), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """Token ids as a text, special tokens included."""
    options = service.options
    body = await read_struct(request, DetokenizeRequest, limit=options.max_body_bytes, timeout=options.body_timeout)
    service.check_model(body.model)
    vocab = service.engine.info.vocab_size
    if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= vocab):
        raise BadRequest(f"tokens: ids must lie in [0, {vocab}) for this model", param="tokens")
    text = await off_loop(4 * len(body.tokens), service.tokenizer.decode, body.tokens, False)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
