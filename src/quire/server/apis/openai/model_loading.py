"""POST /v1/models/load and /v1/models/unload: an administrator has a model loaded, or unloaded."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.models import json_response, model_card
from quire.server.apis.openai.replies import ModelCard, NamedModel
from quire.server.http.body import read_struct
from quire.server.http.errors import HttpError
from quire.server.http.routes import Route
from quire.server.models.pool import PooledModel
from quire.server.models.state import ModelServer


async def load_model(server: ModelServer, request: Request) -> Response:
    """Load a model now, and reply when it is loaded."""
    model = await _administered(server, request)
    await server.pool.load(model.entry.name)
    return _state_of(server, model)


async def unload_model(server: ModelServer, request: Request) -> Response:
    """Unload a model after its running requests. The next request that names it loads it again."""
    model = await _administered(server, request)
    await server.pool.unload(model.entry.name)
    return _state_of(server, model)


async def _administered(server: ModelServer, request: Request) -> PooledModel:
    """The model that an administrator names."""
    if server.keys.needed and not request.state.tenant.admin:
        raise HttpError(403, 'this key may not load or unload models: it has no "admin": true', code="forbidden")
    body = await read_struct(request, server.options, lambda _: NamedModel)
    return server.model(body.model)


def _state_of(server: ModelServer, model: PooledModel) -> Response:
    server.pool.note_failures()
    return json_response(model_card(server, model, model.entry.name))


ROUTES = (
    Route(
        "POST",
        "/v1/models/load",
        load_model,
        body=(NamedModel,),
        reply=(ModelCard,),
        access="admin",
        per_model=False,
    ),
    Route(
        "POST",
        "/v1/models/unload",
        unload_model,
        body=(NamedModel,),
        reply=(ModelCard,),
        access="admin",
        per_model=False,
        errors={409: "The server was started with this model, which stays"},
    ),
)
