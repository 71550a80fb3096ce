"""All routes of a server of one model, joined from the modules that declare them, in the documents' order."""

from __future__ import annotations

from quire.server import monitoring, pages
from quire.server.api import (
    admin,
    anthropic,
    chat,
    completions,
    llama_cpp,
    models,
    ollama,
    ollama_embed,
    ollama_models,
    responses,
    tgi,
    tokenize,
    vectors,
)
from quire.server.http.routes import RouteTable

TABLE = RouteTable(
    route
    for module in (
        completions,
        chat,
        vectors,
        responses,
        models,
        admin,
        tokenize,
        monitoring,
        pages,
        anthropic,
        ollama,
        ollama_embed,
        ollama_models,
        llama_cpp,
        tgi,
    )
    for route in module.ROUTES
)
