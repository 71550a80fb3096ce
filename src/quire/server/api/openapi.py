"""/openapi.json: every route, with the schemas of bodies and replies, which msgspec knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.api.admin import LoadLora, UnloadLora
from quire.server.api.meanings import describe as describe_fields
from quire.server.api.others import LISTS, OTHERS, SSE
from quire.server.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
)
from quire.server.api.replies import (
    ChatCompletion,
    Completion,
    Load,
    ModelCard,
    ModelList,
    NamedModel,
    Readiness,
    StateCard,
    Text,
    Tokens,
    Version,
)
from quire.server.api.responses import Deleted
from quire.server.api.responses_answer import ResponseReply
from quire.server.api.responses_bodies import ResponsesRequest
from quire.server.api.vectors import EmbeddingRequest, Embeddings, Ranking, RerankRequest, ScoreRequest, Scores
from quire.server.http.dialects import dialect_of
from quire.server.http.history import Past
from quire.server.pages import Live

Kinds = tuple[type[msgspec.Struct], ...]
MODELS = ("/v1/models/load", "/v1/models/unload")

BODIES: dict[str, Kinds] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/embeddings": (EmbeddingRequest,),
    **dict.fromkeys(("/v1/score", "/score"), (ScoreRequest,)),
    **dict.fromkeys(("/v1/rerank", "/rerank"), (RerankRequest,)),
    "/v1/responses": (ResponsesRequest,),
    "/v1/load_lora_adapter": (LoadLora,),
    "/v1/unload_lora_adapter": (UnloadLora,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
    **dict.fromkeys(MODELS, (NamedModel,)),
    **{other.path: (other.body,) for other in OTHERS if other.body is not None},
}
REPLIES: dict[str, Kinds] = {
    "/v1/completions": (Completion,),
    "/v1/chat/completions": (ChatCompletion,),
    "/v1/embeddings": (Embeddings,),
    **dict.fromkeys(("/v1/score", "/score"), (Scores,)),
    **dict.fromkeys(("/v1/rerank", "/rerank"), (Ranking,)),
    "/v1/responses": (ResponseReply,),
    "/v1/responses/{response_id}": (ResponseReply, Deleted),
    "/v1/responses/{response_id}/cancel": (ResponseReply,),
    "/v1/models": (ModelList,),
    "/v1/models/{model:path}": (ModelCard,),
    **dict.fromkeys(MODELS, (StateCard,)),
    "/tokenize": (Tokens,),
    "/detokenize": (Text,),
    "/readyz": (Readiness,),
    "/load": (Load,),
    "/version": (Version,),
    "/dashboard/state": (Live,),
    "/dashboard/history": (Past,),
    **{other.path: (other.reply,) for other in OTHERS},
}
STREAMED = {
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/responses"), SSE),
    **{other.path: other.stream for other in OTHERS if other.stream},
}
PLAIN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics")
ADMIN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", *MODELS)

ANY = {400: "Not HTTP, or a bad field", 401: "No valid key", 421: "A Host this server does not answer to",
       431: "Headers too large", 500: "Internal error"}  # fmt: skip
WITH_BODY = {408: "The body was too slow", 413: "The body is too large", 415: "Not JSON, or compressed"}
GENERATES = {404: "No such model", 429: "The queue, or the rate of the key, is full", 503: "Draining, or no engine"}
_REFS = "#/components/schemas/{name}"


def openapi_route(version: str, routes: Sequence[tuple[str, str, str]], strict: bool) -> Route:
    """The route of the document that describes `routes`: method, path and summary of each. It is made when first asked
    for. There are no pages that show it: those that exist load scripts from elsewhere."""
    made = cache(lambda: document(version, routes, strict))

    async def openapi(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        found = made() | ({"servers": [{"url": root}]} if root else {})
        return Response(msgspec.json.encode(found), media_type="application/json")

    return Route("/openapi.json", openapi, methods=["GET"])


def document(version: str, routes: Sequence[tuple[str, str, str]], strict: bool) -> dict[str, Any]:
    """A description as OpenAPI 3.1 has it. Bodies may have other fields unless the server is `strict`."""
    paths: dict[str, Any] = {}
    for method, path, summary in routes:
        told, verb = path.replace(":path", ""), method.lower()
        name = f"{verb}{re.sub('[{}]', '', told).replace('/', '_')}"
        paths.setdefault(told, {})[verb] = {"summary": summary, "operationId": name} | _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas(strict)},
    }


def _operation(path: str) -> dict[str, Any]:
    """The parameters, the body and the responses of `path`."""
    found: dict[str, Any] = {}
    named = re.search(r"{(\w+)", path)
    if named is not None:
        found["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/reset_prefix_cache":
        flag = {"type": "boolean", "enum": [False]}
        found["parameters"] = [{"name": "reset_running_requests", "in": "query", "schema": flag}]
    if path in BODIES:
        found["requestBody"] = {"content": {"application/json": {"schema": _schema(BODIES[path])}}, "required": True}
    return found | {"responses": _responses(path)}


def _schemas(strict: bool) -> dict[str, Any]:
    bodies = [kind for group in BODIES.values() for kind in group]
    errors = {dialect_of(path).shape for path in (*BODIES, *REPLIES)}
    replies = [*errors, *(kind for group in REPLIES.values() for kind in group)]
    _, schemas = msgspec.json.schema_components([*bodies, *replies], schema_hook=_lazy, ref_template=_REFS)
    for schema in schemas.values() if not strict else ():
        schema.pop("additionalProperties", None)
    for kind in bodies:
        describe_fields(schemas[kind.__name__], kind.__name__, kind.__struct_fields__)
    return schemas


def _lazy(kind: type) -> dict[str, Any]:
    """Lists whose items are made as they are written."""
    if kind is Iterator:
        return {"type": "array"}
    raise NotImplementedError(kind)  # so msgspec wants it of a hook that does not know a type


def _responses(path: str) -> dict[str, Any]:
    errors = dict(ANY)
    if path in BODIES:
        errors |= WITH_BODY | GENERATES
    if path in ADMIN:
        errors |= GENERATES | {403: "Neither this key nor this server has leave to do this"}
    if path.startswith("/v1/models/"):
        errors[404] = GENERATES[404]
    if path.startswith("/v1/responses/"):
        errors |= {404: "No such response", 429: GENERATES[429], 503: GENERATES[503]}
    error = {"application/json": {"schema": _schema((dialect_of(path).shape,))}}
    found: dict[str, Any] = {"200": {"description": "As asked", "content": _contents(path)}}
    found |= {str(status): {"description": text, "content": error} for status, text in errors.items()}
    if path in ("/health", "/ping"):
        found["503"] = {"description": "No engine answers now"}
    if path == "/readyz":
        found["503"] = {"description": "Not ready, and why", "content": _contents(path)}
    return found


def _contents(path: str) -> dict[str, Any]:
    """The media types of a good reply and their schemas."""
    found: dict[str, Any] = {}
    if path in REPLIES:
        schema = _schema(REPLIES[path])
        found["application/json"] = {"schema": {"type": "array", "items": schema} if path in LISTS else schema}
    text = {"schema": {"type": "string"}}
    return (
        found | ({STREAMED[path]: text} if path in STREAMED else {}) | ({"text/plain": text} if path in PLAIN else {})
    )


def _schema(kinds: Kinds) -> dict[str, Any]:
    refs = [{"$ref": _REFS.format(name=kind.__name__)} for kind in kinds]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}
