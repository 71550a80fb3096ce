"""The routes of the server, with what each is for."""

from __future__ import annotations

from quire.server.api.openapi import STREAMED
from quire.server.api.others import OTHERS
from quire.server.app import ROUTES
from quire.server.several.routes import OWN
from words import table


def every_route() -> str:
    """Method, path, what it does and how it streams: OpenAI's and vLLM's, others', those of several models."""
    others = {(other.method, other.path) for other in OTHERS}
    ours = [route for route in ROUTES if route[:2] not in others]
    several = [route for route in OWN if route[:2] not in {(method, path) for method, path, _ in ROUTES}]
    return (
        f"### OpenAI's, vLLM's and the server's own\n\n{_rows(ours)}\n"
        f"### Anthropic's, Ollama's, llama.cpp's and TGI's\n\n{_rows([r for r in ROUTES if r[:2] in others])}\n"
        f"### With several models\n\n{_rows(several)}"
    )


def _rows(routes: list[tuple[str, str, object]]) -> str:
    rows = [
        (
            f"`{method} {path.replace(':path', '')}`",
            first_line(handler),
            f"`{STREAMED[path]}`" if path in STREAMED else "",
        )
        for method, path, handler in routes
    ]
    return table(("route", "what it does", "streams as"), rows)


def first_line(found: object) -> str:
    """Of the docstring."""
    return (found.__doc__ or "").strip().splitlines()[0]
