"""What Ollama's clients ask of models: /api/tags, /api/ps, /api/show, /api/version, and what commands do here."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.files import read_json
from quire.server.apis.ollama.bodies import Named
from quire.server.apis.ollama.chat import stamp
from quire.server.apis.openai.replies import Version
from quire.server.http.body import read_struct
from quire.server.http.dialects import OLLAMA
from quire.server.http.errors import HttpError
from quire.server.http.gateway import ServerState
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.models.pool import PooledModel
from quire.server.models.state import ModelServer, service_of
from quire.server.service import VERSION, Service
from quire.text.infill import format_of


class Details(msgspec.Struct, kw_only=True):
    """Details of a model's files."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A name that requests may give. `digest`: changes when answers may; `size`: bytes of weights; of models that are
    loaded on demand, /api/tags adds their KV caches."""

    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int
    digest: str
    details: Details
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """Response of /api/tags, all models, and of /api/ps, those that are loaded."""

    models: list[OllamaModel]


class Shown(msgspec.Struct, kw_only=True):
    """Response of /api/show. `parameters`: sampling defaults, a line each."""

    modelfile: str = ""
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


async def tags(server: ModelServer, request: Request) -> Response:
    """List the served models in Ollama's format."""
    return _json(OllamaModels(models=[_tag(server, *named) for named in server.named_models()]))


def _tag(server: ModelServer, model: PooledModel, name: str) -> OllamaModel:
    """What is listed of a model: what its engine says where that stays, else what is the same whether it is loaded."""
    entry, when = model.entry, stamp(server.created)
    if server.permanent is not None:
        return _loaded_model(server.permanent, name, modified_at=when)
    digest = hashlib.sha256(f"{entry.folder}\0{entry.scheme}\0{name}".encode()).hexdigest()
    details = details_of(entry.folder, entry.scheme, entry.family)
    return OllamaModel(name=name, model=name, modified_at=when, size=entry.needed_bytes, digest=digest, details=details)


async def ps(server: ModelServer, request: Request) -> Response:
    """List the loaded models in Ollama's format."""
    server.pool.note_failures()
    named = ((service_of(model), name) for model, name in server.named_models())
    return _json(OllamaModels(models=[_running(service, name) for service, name in named if service is not None]))


def _running(service: Service, name: str) -> OllamaModel:
    info = service.engine.info
    memory = info.weight_bytes if service.config.device.device == "cuda" else 0
    return _loaded_model(service, name, size_vram=memory, context_length=info.max_model_len)


async def show(service: Service, request: Request) -> Response:
    """Return information on a model in Ollama's format."""
    body = await read_struct(request, service.options, lambda _: Named)
    name = body.model or body.name
    if name is None:
        raise BadRequest("model: required, and missing", param="model")
    service.check_model(name)
    info, formats = service.engine.info, service.formats
    details = details_of(info.folder, info.quantization, info.family)
    pooling = info.pooling
    capabilities = ["completion"] if pooling.generates else []
    capabilities += ["embedding"] if not pooling.refused and not pooling.labels else []
    capabilities += ["insert"] if format_of(service.tokenizer) is not None else []
    capabilities += ["vision"] if info.takes_images else []
    capabilities += ["tools"] if formats.tools is not None else []
    capabilities += ["thinking"] if formats.reasoning is not None else []
    family = details.family
    facts = {"general.architecture": family, f"{family}.context_length": info.max_model_len,
             f"{family}.vocab_size": info.vocab_size}  # fmt: skip
    return _json(
        Shown(
            parameters="\n".join(f"{field} {value}" for field, value in service.defaults.items()),
            template="" if service.template is None else service.template.source,
            details=details,
            model_info=facts,
            capabilities=capabilities,
            modified_at=stamp(service.created),
        )
    )


async def version(server: ServerState, request: Request) -> Response:
    """Return the server's version for Ollama's clients."""
    return _json(Version(version=VERSION))


async def pull(server: ServerState, request: Request) -> Response:
    """Refuse to download a model: `quire pull` does it."""
    raise _by_command("quire pull MODEL downloads it, and quire serve MODEL serves it")


async def create(server: ServerState, request: Request) -> Response:
    """Refuse to make a model: flags of `quire serve` and `quire compress` do it."""
    raise _by_command(
        "quire compress MODEL OUT makes one, and flags of quire serve (--chat-template, --generation-config) change one"
    )


async def copy(server: ServerState, request: Request) -> Response:
    """Refuse to copy a model: `--served-model-name` gives it further names."""
    raise _by_command("quire serve MODEL --served-model-name NAME gives it another name")


async def delete(server: ServerState, request: Request) -> Response:
    """Refuse to remove a model: `quire rm` does it."""
    raise _by_command("quire rm MODEL removes it")


def _by_command(command: str) -> HttpError:
    return HttpError(501, f"a running server does not change models: {command}", code="not_implemented")


def _loaded_model(service: Service, name: str, **more: Any) -> OllamaModel:
    info = service.engine.info
    digest = hashlib.sha256(f"{info.model}\0{info.weights}\0{name}\0{service.fingerprint}".encode()).hexdigest()
    details = details_of(info.folder, info.quantization, info.family)
    return OllamaModel(name=name, model=name, size=info.weight_bytes, digest=digest, details=details, **more)


def details_of(folder: str, quantization: str, family: str) -> Details:
    """Details of the files of a model. `family`: what it is called where no config.json says it."""
    path = Path(folder)
    family = str(read_json(path / "config.json").get("model_type", family or "unknown")) if folder else "unknown"
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    return Details(format=kind, family=family, families=[family], quantization_level=quantization)


def _json(value: msgspec.Struct) -> Response:
    return JsonResponse(msgspec.json.encode(value))


_BY_COMMAND = {501: "A command does it, which the error names"}
ROUTES = (
    Route("POST", "/api/show", show, body=(Named,), reply=(Shown,), dialect=OLLAMA, model_field="name"),
    Route("GET", "/api/tags", tags, reply=(OllamaModels,), dialect=OLLAMA, per_model=False),
    Route("GET", "/api/ps", ps, reply=(OllamaModels,), dialect=OLLAMA, per_model=False),
    Route("GET", "/api/version", version, reply=(Version,), dialect=OLLAMA, per_model=False),
    Route("POST", "/api/pull", pull, dialect=OLLAMA, per_model=False, errors=_BY_COMMAND),
    Route("POST", "/api/create", create, dialect=OLLAMA, per_model=False, errors=_BY_COMMAND),
    Route("POST", "/api/copy", copy, dialect=OLLAMA, per_model=False, errors=_BY_COMMAND),
    Route("DELETE", "/api/delete", delete, dialect=OLLAMA, per_model=False, errors=_BY_COMMAND),
)
