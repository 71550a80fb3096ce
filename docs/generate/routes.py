"""The routes of the server, with what each is for."""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.http.dialects import OPENAI, RESPONSES
from quire.server.http.routes import Route
from quire.server.routes import TABLE
from words import table


def every_route() -> str:
    """Method, path, what it does and how it streams: OpenAI's and vLLM's, others'."""
    ours = [route for route in TABLE.routes if route.dialect in (OPENAI, RESPONSES)]
    others = [route for route in TABLE.routes if route not in ours]
    return (
        f"### OpenAI, vLLM and the server itself\n\n{_rows(ours)}\n"
        f"### Anthropic, Ollama, llama.cpp and TGI\n\n{_rows(others)}"
    )


def _rows(routes: Iterable[Route]) -> str:
    rows = [
        (f"`{route.method} {route.shown_path}`", route.summary, f"`{route.stream}`" if route.stream else "")
        for route in routes
    ]
    return table(("route", "what it does", "streams as"), rows)
