"""/openapi.json: every route, with the schemas of bodies and replies, which msgspec knows, and what fields mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from quire.server.apis.unsupported import UNBUILT, WITHOUT_EFFECT
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Kinds, Route

ANY = {400: "Not HTTP, or a bad field", 401: "No valid key", 421: "A Host this server does not answer to",
       431: "Headers too large", 500: "Internal error"}  # fmt: skip
WITH_BODY = {408: "The body was too slow", 413: "The body is too large", 415: "Not JSON, or compressed"}
GENERATES = {404: "No such model", 429: "The queue, or the rate of the key, is full", 503: "Draining, or no engine"}
_REFS = "#/components/schemas/{name}"


def openapi_endpoint(version: str, routes: Sequence[Route], strict: bool) -> Endpoint:
    """The endpoint of the document that describes `routes`, which is made when first asked for. `/docs` shows it."""
    made = cache(lambda: document(version, routes, strict))

    async def openapi(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        found = made() | ({"servers": [{"url": root}]} if root else {})
        return JsonResponse(msgspec.json.encode(found))

    return Endpoint("/openapi.json", openapi, methods=["GET"])


def document(version: str, routes: Sequence[Route], strict: bool) -> dict[str, Any]:
    """A description as OpenAPI 3.1 has it. Bodies may have other fields unless the server is `strict`."""
    paths: dict[str, Any] = {}
    for route in routes:
        path, verb = route.shown_path, route.method.lower()
        name = f"{verb}{re.sub('[{}]', '', path).replace('/', '_')}"
        paths.setdefault(path, {})[verb] = {
            "tags": [route.heading], "summary": route.summary, "operationId": name,
        } | _operation(route)  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas(routes, strict)},
    }


def _operation(route: Route) -> dict[str, Any]:
    """The parameters, the body and the responses of a route."""
    found: dict[str, Any] = {}
    named = re.search(r"{(\w+)", route.path)
    if named is not None:
        found["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.query:
        found["parameters"] = [{"name": name, "in": "query", "schema": kind} for name, kind in route.query.items()]
    if route.body:
        kind = "multipart/form-data" if route.form else "application/json"
        found["requestBody"] = {"content": {kind: {"schema": _schema(route.body)}}, "required": True}
    return found | {"responses": _responses(route)}


def _schemas(routes: Sequence[Route], strict: bool) -> dict[str, Any]:
    bodies = [kind for route in routes for kind in route.body]
    errors = {route.dialect.shape for route in routes}
    replies = [*errors, *(kind for route in routes for kind in route.reply)]
    replies += [route.reply_type for route in routes if route.reply_type is not None]
    _, schemas = msgspec.json.schema_components([*bodies, *replies], schema_hook=_lazy, ref_template=_REFS)
    for schema in schemas.values() if not strict else ():
        schema.pop("additionalProperties", None)
    for kind in bodies:
        describe(schemas[kind.__name__], kind)
    return schemas


def _lazy(kind: type) -> dict[str, Any]:
    """Lists whose items are made as they are written."""
    if kind is Iterator:
        return {"type": "array"}
    raise NotImplementedError(kind)  # so msgspec wants it of a hook that does not know a type


def _responses(route: Route) -> dict[str, Any]:
    errors = dict(ANY)
    if route.body:
        errors |= WITH_BODY | GENERATES
    if route.access == "admin":
        errors |= GENERATES | {403: "Neither this key nor this server has leave to do this"}
    errors |= route.errors
    error = {"application/json": {"schema": _schema((route.dialect.shape,))}}
    content = _content(route)
    found: dict[str, Any] = {"200": {"description": "As asked", "content": content}}
    found |= {str(status): {"description": text, "content": error} for status, text in errors.items()}
    if route.unavailable:
        found["503"] = {"description": route.unavailable} | ({"content": content} if content else {})
    return found


def _content(route: Route) -> dict[str, Any]:
    """The media types of a good reply and their schemas."""
    found: dict[str, Any] = {}
    if route.reply:
        schema = _schema(route.reply)
        items = {"type": "array", "items": schema}
        either = {"anyOf": [schema, items]} if route.reply_may_be_list else schema
        found["application/json"] = {"schema": items if route.reply_is_list else either}
    if route.reply_type is not None:
        [schema], _ = msgspec.json.schema_components([route.reply_type], schema_hook=_lazy, ref_template=_REFS)
        found["application/json"] = {"schema": {"anyOf": [schema, _schema(route.reply)]} if route.reply else schema}
    text = {"schema": {"type": "string"}}
    return found | ({route.stream: text} if route.stream else {}) | ({"text/plain": text} if route.text else {})


def _schema(kinds: Kinds) -> dict[str, Any]:
    refs = [{"$ref": _REFS.format(name=kind.__name__)} for kind in kinds]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


NO_EFFECT = "Ignored: it cannot change the output. The Warning header names it."


@cache
def help_of(body: type[msgspec.Struct]) -> dict[str, str]:
    """The meaning of each field of `body`. `KeyError` for a field that says none and is not refused either."""
    return {field.name: _help(field.name, field.type) for field in msgspec.structs.fields(body)}


def _help(name: str, kind: object) -> str:
    if get_origin(kind) is Annotated:
        said = (part.description for part in get_args(kind)[1:] if isinstance(part, msgspec.Meta))
        if text := next(filter(None, said), None):
            return text
    return NO_EFFECT if name in WITHOUT_EFFECT else f"Refused: {UNBUILT[name][1]}."


def describe(schema: dict[str, object], body: type[msgspec.Struct]) -> None:
    """Write the help of its fields into the schema of a body."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for name, text in help_of(body).items():
        properties[name]["description"] = text
