"""All routes of a server, joined from the modules that declare them, in the documents' order."""

from __future__ import annotations

from quire.server import dashboard, monitoring
from quire.server.apis.anthropic import messages
from quire.server.apis.llama_cpp import completion
from quire.server.apis.ollama import chat as ollama_chat
from quire.server.apis.ollama import embed as ollama_embed
from quire.server.apis.ollama import models as ollama_models
from quire.server.apis.openai import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    model_loading,
    models,
    responses,
    scoring,
    tokenize,
    transcriptions,
)
from quire.server.apis.tei import embed_inputs, predict
from quire.server.apis.tgi import generate
from quire.server.http.routes import RouteTable

TABLE = RouteTable(
    (
        *completions.ROUTES,
        *chat.ROUTES,
        *embeddings.ROUTES,
        *scoring.ROUTES,
        *classify.ROUTES,
        *transcriptions.ROUTES,
        *responses.ROUTES,
        *models.ROUTES,
        *adapters.ROUTES,
        *tokenize.ROUTES,
        *monitoring.ROUTES,
        *dashboard.ROUTES,
        *messages.ROUTES,
        *ollama_chat.ROUTES,
        *ollama_embed.ROUTES,
        *ollama_models.ROUTES,
        *completion.ROUTES,
        *generate.ROUTES,
        *embed_inputs.ROUTES,
        *predict.ROUTES,
        *model_loading.ROUTES,
    )
)
