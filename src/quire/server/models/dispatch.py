"""Calls the handler of a route: with the server, or with the service of the model that a request is for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.core.errors import BadRequest
from quire.server.http.body import Read, off_loop, read_bytes, shaped
from quire.server.http.disconnect import cancel_on_disconnect
from quire.server.http.multipart import read_form
from quire.server.http.parsing import read_json
from quire.server.http.routes import Route
from quire.server.models.pool import PooledModel
from quire.server.models.state import LoadedModel, ModelServer, keep_adapter


class ModelFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of bodies that may name the model: `name` in Ollama's, `parameters` in TGI's."""

    model: Any = None
    name: Any = None
    lora_name: Any = None
    lora_path: Any = None
    parameters: Any = None


class ReleaseAfterResponse:
    """Middleware that keeps what a request enters in `request.state.held` until its response was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        async with AsyncExitStack() as held:
            await self._app({**scope, "state": {**scope.get("state", {}), "held": held}}, receive, send)


def caller(server: ModelServer, route: Route) -> Callable[[Request], Awaitable[Response]]:
    """A function that answers requests to `route`.

    Where the server has one model for life, it chooses nothing and reads nothing of a request.
    """
    if not route.per_model:
        return partial(route.handler, server)
    if server.permanent is not None:
        return partial(route.handler, server.permanent)
    return partial(_call_loaded, server, route)


async def _call_loaded(server: ModelServer, route: Route, request: Request) -> Response:
    """The answer of the model that a request is for, which is loaded first."""
    receive, fields = request.receive, ModelFields()
    if route.form:
        request.state.form = form = await read_form(request, server.options)
        fields = ModelFields(model=next(iter(form.fields.get("model", ())), None))
    elif route.body:
        data = await read_bytes(request, server.options.max_body_bytes, server.options.body_timeout)
        value = await off_loop(len(data), read_json, data)
        fields = shaped(value, ModelFields)
        request.state.read = Read(value, len(data))
    model = _model(server, route, fields, request.query_params.get("model"))
    held: AsyncExitStack = request.state.held
    async with cancel_on_disconnect(receive):
        running = await held.enter_async_context(server.pool.use(model.entry.name))
    response = await route.handler(cast(LoadedModel, running).service, request)
    if _has_field(route, "lora_name"):
        keep_adapter(model, fields.lora_name, fields.lora_path if _has_field(route, "lora_path") else "")
    return response


def _model(server: ModelServer, route: Route, fields: ModelFields, queried: str | None) -> PooledModel:
    """The model that a body names, or else the address (`queried`), or whose adapter is meant; else the first.

    `BadRequest`, `ModelNotFound`.
    """
    if fields.model is not None or queried is not None:
        model = server.model(queried if fields.model is None else fields.model)
    else:
        model = server.model(_field(fields, route.model_field) if route.model_field else None)
    if not _has_field(route, "lora_name") or not isinstance(fields.lora_name, str):
        return model
    found, name = server.find(fields.lora_name) or model, fields.lora_name[:200]
    if "=" in name:  # it is kept as name=folder, for the next load of its model
        raise BadRequest(f"lora_name: {name!r} must hold no =", param="lora_name")
    if fields.model is not None and found is not model:
        raise BadRequest(f"lora_name: {name!r} belongs to model {found.entry.name!r}", param="lora_name")
    return found


def _has_field(route: Route, name: str) -> bool:
    """Whether a body of the route has that field."""
    return any(name in kind.__struct_fields__ for kind in route.body)


def _field(fields: ModelFields, path: str) -> Any:
    """The field of a body at a path as `parameters.adapter_id`; None where it has none."""
    first, _, inner = path.partition(".")
    value = getattr(fields, first)
    return value if not inner else value.get(inner) if isinstance(value, dict) else None
