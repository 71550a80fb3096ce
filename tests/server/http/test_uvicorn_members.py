"""Members of uvicorn and httptools without a promise, which connections and draining rely on, are there."""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from paths import ROOT
from quire.server.http.connection import LimitedProtocol

HOOKS = {
    "connection_made", "connection_lost", "eof_received", "data_received", "on_message_begin", "on_url", "on_header",
    "on_headers_complete", "on_body", "on_message_complete", "on_response_complete", "pause_writing", "resume_writing",
    "send_400_response", "_unsupported_upgrade_warning",
}  # fmt: skip
CALLED = {"_unset_keepalive_if_required", "timeout_keep_alive_handler"}
HELD = {"cycle", "pipeline", "scope", "headers", "parser", "loop", "transport", "timeout_keep_alive_task",
        "timeout_keep_alive"}  # fmt: skip


async def nothing(scope: object, receive: object, send: object) -> None:
    """Serve as an app that answers nothing."""


def required() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(r for r in map(Requirement, project["dependencies"]) if r.name == "uvicorn")


def test_one_minor_version_is_let_in() -> None:
    low, high = sorted(required().specifier, key=lambda bound: bound.operator == "<")
    assert (low.operator, high.operator) == (">=", "<")
    major, minor, *_ = map(int, low.version.split("."))
    assert high.version == f"{major}.{minor + 1}" and version("uvicorn") in required().specifier


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_what_the_protocol_overrides_is_called_by_uvicorn(name: str) -> None:
    theirs, ours = getattr(HttpToolsProtocol, name), getattr(LimitedProtocol, name)
    assert theirs is not ours
    assert len(inspect.signature(theirs).parameters) == len(inspect.signature(ours).parameters)


def test_every_override_is_listed() -> None:
    both = {name for name in vars(LimitedProtocol) if name in dir(HttpToolsProtocol) and not name.startswith("__")}
    assert both == HOOKS


def test_private_members_that_are_called_are_there() -> None:
    assert all(callable(getattr(HttpToolsProtocol, name)) for name in CALLED)
    assert "self._unsupported_upgrade_warning()" in Path(httptools_impl.__file__).read_text()
    assert httptools_impl.STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    cycle = Path(httptools_impl.__file__).read_text()
    assert "self.transport = " in cycle and "self.response_complete = " in cycle
    assert callable(httptools.HttpRequestParser.set_dangerous_leniencies)


def test_attributes_of_a_connection_are_there() -> None:
    config = uvicorn.Config(nothing, lifespan="off")
    config.load()
    loop = asyncio.new_event_loop()
    try:
        protocol: Any = HttpToolsProtocol(config, ServerState(), {}, loop)
        assert {name for name in HELD if not hasattr(protocol, name)} == set()
    finally:
        loop.close()


def test_what_draining_overrides_is_there() -> None:
    assert {"capture_signals", "handle_exit", "on_tick", "shutdown"} <= set(vars(uvicorn.Server))
    server = uvicorn.Server(uvicorn.Config(nothing))
    assert server.force_exit is server.should_exit is False
    assert "self.lifespan = " in Path(uvicorn.server.__file__).read_text()
