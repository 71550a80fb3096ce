"""What a server says once it listens: a panel of addresses on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import sys

from quire.core.version import VERSION
from quire.engine.shown_facts import memory_line, slots_line
from quire.server.models.state import ModelServer

logger = logging.getLogger("quire.server")
PLACES = (
    ("page", "/", "chat with the model in a browser"),
    ("dashboard", "/dashboard", "requests, speed and cache, live"),
    ("API", "/v1", "base URL of OpenAI's clients; Ollama's, Anthropic's and llama.cpp's use the address itself"),
    ("docs", "/docs", "the API, described"),
    ("schema", "/openapi.json", "the API, for programs"),
)
"""What a user may open: name, path, and what it is."""


def announce(state: ModelServer, address: str, paths: frozenset[str]) -> None:
    """Tell where the server is, with its models, their memory, and those of its pages that `paths` has."""
    if not logger.isEnabledFor(logging.INFO):
        return
    found = places(state, address, paths)
    if not sys.stderr.isatty():
        for name, text in facts(state) + [(name, place) for name, place, _ in found]:
            logger.info("%s: %s", name, text)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in facts(state):
        grid.add_row(Text(name, style="bold"), text)
    longest = max((len(place) for _, place, _ in found), default=0)
    for name, place, told in found:
        grid.add_row(Text(name, style="bold"), Text.assemble((f"{place:{longest}}  ", "cyan"), (told, "dim")))
    end = Text("Ctrl-C or quire stop ends the server; requests in flight are finished", style="dim")
    shown = Table.grid()
    shown.add_row(grid)
    shown.add_row(end)
    Console(stderr=True).print(
        Panel(shown, title=f"quire {VERSION}", title_align="left", expand=False, border_style="dim")
    )


def facts(state: ModelServer) -> list[tuple[str, str]]:
    """The models; memory and sequences of one that is loaded."""
    names = [model.entry.name for model in state.pool.models.values()]
    if state.permanent is None:
        budget = state.options.models_memory_gb
        room = f"up to {budget:g} GB" if budget else "no bound (--models-memory-gb)"
        return [("models", ", ".join(names)), ("memory", f"{room}; models are loaded when they are asked for")]
    info = state.permanent.engine.info
    kind = info.dtype if info.quantization == "none" else info.quantization
    return [
        ("model", f"{', '.join(state.permanent.names)}: {kind}, {info.backend}/{info.isa}, {info.threads} threads"),
        ("memory", memory_line(info)),
        ("slots", slots_line(state.permanent.config, info.drafts)),
    ]


def places(state: ModelServer, address: str, paths: frozenset[str]) -> list[tuple[str, str, str]]:
    """Name, address and purpose of what the server has for a browser or a client."""
    if address.startswith("unix:"):
        return []
    base = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + state.options.root_path
    shown = paths | {"/v1"} if state.options.playground else (paths | {"/v1"}) - {"/"}
    return [(name, base + path, told) for name, path, told in PLACES if path in shown]
