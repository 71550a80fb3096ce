"""GET /v1/models: every model and adapter by its names, with its state."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.replies import ModelCard, ModelList, modalities
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.models.pool import PooledModel
from quire.server.models.state import ModelServer, service_of


async def list_models(server: ModelServer, request: Request) -> Response:
    """List the models and LoRA adapters with their states. A model with several names has an entry for each name."""
    server.pool.note_failures()
    return json_response(ModelList(data=[model_card(server, *named) for named in server.named_models()]))


async def get_model(server: ModelServer, request: Request) -> Response:
    """Return one model or adapter by its name."""
    server.pool.note_failures()
    return json_response(model_card(server, *server.resolve(request.path_params["model"])))


def model_card(server: ModelServer, model: PooledModel, name: str) -> ModelCard:
    """The card of a model under one of its names, or of an adapter of it."""
    entry, service = model.entry, service_of(model)
    parent = None if name in (entry.name, *entry.aliases) else entry.name
    return ModelCard(
        id=name,
        created=server.created,
        root=entry.root,
        parent=parent,
        max_model_len=entry.max_model_len if service is None else service.engine.info.max_model_len,
        input_modalities=modalities(service is not None and service.engine.info.takes_images),
        quire=dict(entry.passport) if entry.passport and parent is None else msgspec.UNSET,
        status=model.state,
        pinned=entry.pinned,
        needed_bytes=entry.needed_bytes,
        error=model.error or None,
    )


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """A reply of one JSON value."""
    return JsonResponse(msgspec.json.encode(value), status)


ROUTES = (
    Route("GET", "/v1/models", list_models, reply=(ModelList,), per_model=False),
    Route(
        "GET",
        "/v1/models/{model:path}",
        get_model,
        reply=(ModelCard,),
        errors={404: "No such model"},
        per_model=False,
    ),
)
