"""Makes the state of a server: of one model whose engine is loaded, or of several that are loaded when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from quire.core.config import EngineConfig
from quire.core.files import read_json
from quire.engine.client import EngineClient
from quire.engine.frontend.async_engine import AsyncEngine
from quire.model.disk.tokenizer import model_template, model_tokenizer
from quire.server.http.metrics import HttpMetrics
from quire.server.models.entry import ModelEntry
from quire.server.models.pool import Pool
from quire.server.models.state import LoadedModel, ModelServer
from quire.server.server_options import ServerOptions
from quire.server.service import Service
from quire.text.template_renderer import RENDERER

StartEngine = Callable[[ExitStack, EngineConfig], EngineClient]
"""Loads a model; what goes on the stack is closed after its engine, or while it is loading to have it given up."""


def open_service(client: EngineClient, config: EngineConfig, options: ServerOptions, http: HttpMetrics) -> Service:
    """The service of a model whose engine is loaded, with the model's tokenizer and template."""
    info = client.info
    tokenizer = model_tokenizer(config.model, info.folder, info.vocab_size)
    template = model_template(config.model, info.folder, tokenizer, info.max_model_len)
    service = Service(AsyncEngine(client), tokenizer, template, options, config, http)
    RENDERER.rest()  # a server of completions alone has no use for its process
    return service


def server_of_one(service: Service) -> ModelServer:
    """The state of a server that has one model for life; the caller closes its engine."""
    info, config = service.engine.info, service.config
    name, *aliases = service.names
    entry = ModelEntry(
        name=name,
        aliases=tuple(aliases),
        config=config,
        server_options={},
        needed_bytes=(info.weight_bytes + info.kv_cache_bytes) * config.parallel.processes,
        max_model_len=info.max_model_len,
        folder=info.folder,
        root=info.model,
        scheme=info.quantization,
        passport=read_json(Path(info.folder) / "quire.json"),
        pinned=True,
        family=info.family,
    )
    return ModelServer(Pool.of_one(entry, LoadedModel(service, ExitStack())), service.options, service.http)


def server_of_several(entries: Sequence[ModelEntry], options: ServerOptions, start_engine: StartEngine) -> ModelServer:
    """The state of a server that loads models when they are asked for; `ConfigError` for those that never could be."""
    http = HttpMetrics()
    load = partial(_load_model, options, start_engine, http)
    return ModelServer(Pool(entries, load, round(options.models_memory_gb * 1e9), options.models_wait), options, http)


def _load_model(
    options: ServerOptions, start_engine: StartEngine, http: HttpMetrics, entry: ModelEntry, until: ExitStack
) -> LoadedModel:
    """A model with a service of its own; raises what `start_engine` does."""
    client = start_engine(until, entry.config)
    until.callback(client.close)
    own = msgspec.structs.replace(options, **entry.server_options)
    return LoadedModel(open_service(client, entry.config, own, http), until)
