"""The routes of other APIs than OpenAI's and vLLM's, with their bodies and replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import anthropic, llama_cpp, ollama, ollama_embed, ollama_models, tgi
from quire.server.api.anthropic_bodies import CountRequest, MessagesRequest
from quire.server.api.ollama_bodies import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Named
from quire.server.api.replies import Version
from quire.server.service import Service

Kind = type[msgspec.Struct]


class Route(NamedTuple):
    """One of another API; `stream`: the media type of its stream, "" where it has none."""

    method: str
    path: str
    handler: Callable[[Service, Request], Awaitable[Response]]
    body: Kind | None
    reply: Kind
    stream: str = ""


SSE = "text/event-stream"
LINES = "application/x-ndjson"
OTHERS = (
    Route("POST", "/v1/messages", anthropic.create_message, MessagesRequest, anthropic.MessagesReply, SSE),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, CountRequest, anthropic.Count),
    Route("POST", "/api/generate", ollama.generate, GenerateRequest, ollama.OllamaReply, LINES),
    Route("POST", "/api/chat", ollama.chat, ChatRequest, ollama.OllamaReply, LINES),
    Route("POST", "/api/embed", ollama_embed.embed, EmbedRequest, ollama_embed.EmbedReply),
    Route("POST", "/api/embeddings", ollama_embed.embeddings, EmbeddingsRequest, ollama_embed.EmbeddingsReply),
    Route("POST", "/api/show", ollama_models.show, Named, ollama_models.Shown),
    Route("GET", "/api/tags", ollama_models.tags, None, ollama_models.OllamaModels),
    Route("GET", "/api/ps", ollama_models.ps, None, ollama_models.OllamaModels),
    Route("GET", "/api/version", ollama_models.version, None, Version),
    Route("POST", "/completion", llama_cpp.completion, llama_cpp.LlamaCppRequest, llama_cpp.LlamaCppReply, SSE),
    Route("GET", "/props", llama_cpp.props, None, llama_cpp.Props),
    Route("GET", "/slots", llama_cpp.slots, None, llama_cpp.Slot),
    Route("POST", "/generate", tgi.generate, tgi.TgiRequest, tgi.TgiReply),
    Route("POST", "/generate_stream", tgi.generate_stream, tgi.TgiRequest, tgi.TgiChunk, SSE),
    Route("POST", "/", tgi.compat_generate, tgi.TgiCompatRequest, tgi.TgiReply, SSE),
    Route("GET", "/info", tgi.info, None, tgi.Info),
)
LISTS = ("/slots", "/")
"""Those whose reply is a list."""
