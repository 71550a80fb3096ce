"""GET /v1/models: the served model under each of its names, and its adapters."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.replies import ModelCard, ModelList, modalities
from quire.server.http.routes import Route
from quire.server.service import Service


def _model_card(service: Service, name: str) -> ModelCard:
    info = service.engine.info
    parent = service.names[0] if name in info.adapters else None
    return ModelCard(
        id=name,
        created=service.created,
        root=info.model,
        parent=parent,
        max_model_len=info.max_model_len,
        input_modalities=modalities(info.takes_images),
        quire=service.passport if service.passport and parent is None else msgspec.UNSET,
    )


async def list_models(service: Service, request: Request) -> Response:
    """List the served models under all of their names, and the adapters."""
    names = (*service.names, *service.engine.info.adapters)
    return json_response(ModelList(data=[_model_card(service, name) for name in names]))


async def get_model(service: Service, request: Request) -> Response:
    """Return one model by its name."""
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(_model_card(service, service.known(name)))


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """A reply of one JSON value."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


ROUTES = (
    Route("GET", "/v1/models", list_models, reply=(ModelList,)),
    Route("GET", "/v1/models/{model:path}", get_model, reply=(ModelCard,), errors={404: "No such model"}),
)
