"""/v1/models: every model and adapter by its names, with its state; models are loaded and unloaded here."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.replies import ModelCard, ModelList, NamedModel, modalities
from quire.server.http.body import read_struct
from quire.server.http.errors import HttpError
from quire.server.http.routes import Route
from quire.server.models.pool import PooledModel
from quire.server.models.state import ModelServer, service_of


async def list_models(server: ModelServer, request: Request) -> Response:
    """List all models with their states, under all of their names, and their adapters."""
    server.pool.note_failures()
    return json_response(ModelList(data=[_model_card(server, *named) for named in server.named_models()]))


async def get_model(server: ModelServer, request: Request) -> Response:
    """Return one model or adapter by its name."""
    server.pool.note_failures()
    return json_response(_model_card(server, *server.resolve(request.path_params["model"])))


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
    return json_response(_model_card(server, model, model.entry.name))


def _model_card(server: ModelServer, model: PooledModel, name: str) -> ModelCard:
    """The card of a model under one of its names, or of an adapter of it."""
    entry, service = model.entry, service_of(model)
    parent = None if name in (entry.name, *entry.aliases) else entry.name
    return ModelCard(
        id=name,
        created=server.created,
        root=entry.root,
        parent=parent,
        max_model_len=entry.max_model_len if service is None else service.engine.info.max_model_len,
        input_modalities=modalities(service is not None and service.engine.info.pictures),
        quire=dict(entry.passport) if entry.passport and parent is None else msgspec.UNSET,
        status=model.state,
        pinned=entry.pinned,
        needed_bytes=entry.needed_bytes,
        error=model.error or None,
    )


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """A reply of one JSON value."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


_PERMANENT = {409: "The server was started with this model, which stays"}
ROUTES = (
    Route("GET", "/v1/models", list_models, reply=(ModelList,), per_model=False),
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
        errors=_PERMANENT,
    ),
    Route(
        "GET",
        "/v1/models/{model:path}",
        get_model,
        reply=(ModelCard,),
        errors={404: "No such model"},
        per_model=False,
    ),
)
