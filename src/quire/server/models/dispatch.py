"""Requests to a server of several models: which of them each is for, and its route called with that one's service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.core.errors import BadRequest, QuireError
from quire.server.app import assemble
from quire.server.http.body import Read, off_loop, read_bytes, shaped
from quire.server.http.disconnect import cancel_on_disconnect
from quire.server.http.parsing import read_json
from quire.server.http.routes import Route
from quire.server.models.pool import Pool, Slot
from quire.server.models.routes import MULTI_MODEL_TABLE
from quire.server.models.state import LoadedModel, MultiModelServer, keep_adapter


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of bodies that may say which model is meant: `name` in Ollama's, `parameters` in TGI's."""

    model: Any = None
    name: Any = None
    lora_name: Any = None
    lora_path: Any = None
    parameters: Any = None


class Holding:
    """What a request takes hold of in `request.state.held` it has until its response was sent (pure ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        async with AsyncExitStack() as held:
            await self._app({**scope, "state": {**scope.get("state", {}), "held": held}}, receive, send)


def create_multi_model_app(server: MultiModelServer) -> Starlette:
    """The application before several models."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loads = asyncio.create_task(_load_pinned(server))
        try:
            yield
        finally:
            loads.cancel()
            await server.pool.close()

    async def call(route: Route, request: Request) -> Response:
        if route.per_model:
            return await _call_model(server, route, request)
        return await route.handler(server, request)

    app = assemble(server, MULTI_MODEL_TABLE, call, lifespan)
    app.add_middleware(Holding)
    return app


async def _load_pinned(server: MultiModelServer) -> None:
    """Load them without being waited for. One that cannot be is in the log and in /v1/models; a request tries again."""
    pinned = [slot.listed.name for slot in server.pool.slots.values() if slot.listed.pinned]
    await asyncio.gather(*(_tried(server.pool, name) for name in pinned))
    server.started = True


async def _tried(pool: Pool, name: str) -> None:
    try:
        await pool.load(name)
    except QuireError:
        return


async def _call_model(server: MultiModelServer, route: Route, request: Request) -> Response:
    """The answer of the model that a request is for."""
    receive, said = request.receive, Naming()
    if route.body:
        data = await read_bytes(request, server.options.max_body_bytes, server.options.body_timeout)
        value = await off_loop(len(data), read_json, data)
        said = shaped(value, Naming)
        request.state.read = Read(value, len(data))
    slot = _slot(server, route, said, request.query_params.get("model"))
    held: AsyncExitStack = request.state.held
    async with cancel_on_disconnect(receive):
        running = await held.enter_async_context(server.pool.use(slot.listed.name))
    response = await route.handler(cast(LoadedModel, running).service, request)
    if _has_field(route, "lora_name"):
        keep_adapter(slot, said.lora_name, said.lora_path if _has_field(route, "lora_path") else "")
    return response


def _slot(server: MultiModelServer, route: Route, said: Naming, asked: str | None) -> Slot:
    """The model that a body names, or else the address (`asked`), or whose adapter is meant; else the first.

    `BadRequest`, `ModelNotFound`.
    """
    if said.model is not None or asked is not None:
        slot = server.slot(asked if said.model is None else said.model)
    else:
        slot = server.slot(_field(said, route.model_field) if route.model_field else None)
    if not _has_field(route, "lora_name") or not isinstance(said.lora_name, str):
        return slot
    owner, name = server.owner(said.lora_name) or slot, said.lora_name[:200]
    if "=" in name:  # it is kept as name=folder, for the next load of its model
        raise BadRequest(f"lora_name: {name!r} must hold no =", param="lora_name")
    if said.model is not None and owner is not slot:
        raise BadRequest(f"lora_name: {name!r} belongs to model {owner.listed.name!r}", param="lora_name")
    return owner


def _has_field(route: Route, name: str) -> bool:
    """Whether a body of the route has that field."""
    return any(name in kind.__struct_fields__ for kind in route.body)


def _field(said: Naming, path: str) -> Any:
    """The field of a body at a path as `parameters.adapter_id`; None where it has none."""
    first, _, inner = path.partition(".")
    value = getattr(said, first)
    return value if not inner else value.get(inner) if isinstance(value, dict) else None
