"""What llama.cpp's clients ask of a server: /props and /slots."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.params import SamplingParams
from quire.server.api.llama_cpp import Props, settings_of
from quire.server.service import VERSION, Service


class Slot(msgspec.Struct, kw_only=True):
    """One of the list of /slots."""

    id: int
    n_ctx: int
    is_processing: bool


async def props(service: Service, request: Request) -> Response:
    """What a server is, as llama.cpp tells it."""
    info = service.engine.info
    params = settings_of(service, SamplingParams(**(service.defaults | {"max_tokens": None})))
    params["n_predict"] = -1
    found = Props(
        default_generation_settings={"n_ctx": info.max_model_len, "params": params},
        total_slots=service.config.scheduler.max_num_seqs,
        model_path=info.folder or info.model,
        chat_template="" if service.template is None else service.template.source,
        modalities={"vision": info.pictures, "audio": False},
        build_info=f"quire {VERSION}",
    )
    return Response(msgspec.json.encode(found), media_type="application/json")


async def slots(service: Service, request: Request) -> Response:
    """The places of the batch, as llama.cpp lists them; no sequence has one of its own, so the first are taken."""
    limit = service.engine.info.max_model_len
    busy = service.engine.in_flight
    places = service.config.scheduler.max_num_seqs
    found = [Slot(id=i, n_ctx=limit, is_processing=i < busy) for i in range(places)]
    return Response(msgspec.json.encode(found), media_type="application/json")
