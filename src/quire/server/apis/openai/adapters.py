"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter and /reset_prefix_cache, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.server.apis.fields import LoraNameField, ModelField
from quire.server.apis.openai.sampling_params import MAX_NAME
from quire.server.http.body import read_struct
from quire.server.http.errors import HttpError, ModelNotFound
from quire.server.http.routes import Route
from quire.server.service import Service

T = TypeVar("T")


class LoadLora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora_path`: a PEFT folder on the server's disk. `load_inplace`: take the place of the adapter of that name.

    `model`: the one that it is for, where there are several.
    """

    lora_name: LoraNameField
    lora_path: Annotated[str, about("Folder of the adapter on the server's disk.")]
    load_inplace: Annotated[bool, about("Replace an adapter of the same name.")] = False
    model: ModelField = None


class UnloadLora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora_int_id` is what vLLM's clients may send; adapters are told apart by name here."""

    lora_name: LoraNameField
    lora_int_id: Annotated[int | None, about("vLLM's number of the adapter; adapters go by name here.")] = None
    model: ModelField = None


async def load_lora_adapter(service: Service, request: Request) -> Response:
    """Load a LoRA adapter. Requests use its name as their model."""
    body = await _read(service, request, LoadLora)
    name, engine = body.lora_name, service.engine
    service.check_model(body.model)
    if not name or len(name) > MAX_NAME or not name.isprintable() or not body.lora_path:
        raise BadRequest(f"lora_name: needs 1 to {MAX_NAME} printable characters, and a lora_path", param="lora_name")
    if name in service.names:
        raise BadRequest(f"lora_name: {name!r} is the model's own name", param="lora_name")
    if name in engine.info.adapters and not body.load_inplace:
        raise BadRequest(f"lora_name: {name!r} is loaded; set load_inplace to replace it", param="lora_name")
    await engine.change_adapter(name, body.lora_path)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter. While a request uses the adapter, the call fails."""
    body = await _read(service, request, UnloadLora)
    service.check_model(body.model)
    if body.lora_name not in service.engine.info.adapters:
        raise ModelNotFound(f"lora_name: {body.lora_name[:200]!r} is not loaded", param="lora_name")
    await service.engine.change_adapter(body.lora_name, "")
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def _read(service: Service, request: Request, kind: type[T]) -> T:
    options = service.options
    if not options.allow_runtime_lora_updating:
        raise HttpError(
            403,
            "adapters cannot be changed; start the server with --allow-runtime-lora-updating",
            code="forbidden",
        )
    return await read_struct(request, options, lambda _: kind)


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Empty the prefix cache, so that later requests do not reuse prefixes of earlier requests.

    vLLM leaves the cache as it is while blocks are in use. Here it is emptied: those that run keep their blocks, which
    nobody else finds any more. So vLLM's `reset_running_requests`, which computes them again, is refused.
    """
    if not service.options.allow_reset_prefix_cache:
        message = "the prefix cache cannot be reset; start the server with --allow-reset-prefix-cache"
        raise HttpError(403, message, code="forbidden")
    if request.query_params.get("reset_running_requests", "false").lower() not in ("false", "0"):
        raise BadRequest(
            "reset_running_requests: not offered: the weights never change, so what runs may keep what it computed",
            param="reset_running_requests",
        )
    service.engine.reset_prefix_cache()
    return Response(status_code=200)


_FLAG = {"type": "boolean", "enum": [False]}
ROUTES = (
    Route("POST", "/v1/load_lora_adapter", load_lora_adapter, body=(LoadLora,), text=True, access="admin"),
    Route("POST", "/v1/unload_lora_adapter", unload_lora_adapter, body=(UnloadLora,), text=True, access="admin"),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, access="admin", query={"reset_running_requests": _FLAG}),
)
