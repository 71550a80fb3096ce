"""Every route of the table below a root path and without one, with a key and without, in its dialect of errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest

from live_server import LiveServer, live
from paths import SOURCE
from quire.server.batch import URLS
from quire.server.http.dialects import DIALECTS, OLLAMA, OPENAI, TGI
from quire.server.http.routes import Route
from quire.server.routes import TABLE

NAME: Callable[[Route], str] = "{0.method} {0.path}".format
ROOT = "/some/where"
SERVER = SOURCE / "server"
KEYS = {"right": {"authorization": "Bearer k"}, "wrong": {"authorization": "Bearer no"}, "none": {}}


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with live(api_key=("k",)) as found:
        yield found


@pytest.fixture(scope="module")
def below() -> Iterator[LiveServer]:
    """One that is told that it lies below a path."""
    with live(api_key=("k",), root_path=ROOT) as found:
        yield found


@pytest.fixture(scope="module")
def protected() -> Iterator[LiveServer]:
    with live(api_key=("k",), protect_metrics=True) as found:
        yield found


def asked(server: LiveServer, route: Route, prefix: str, key: str) -> httpx.Response:
    """The answer to a request whose body, if there is one, lacks a field that is required."""
    url = prefix + re.sub(r"{[^}]*}", "stub", route.path)
    return server.http.request(route.method, url, headers=KEYS[key], json={} if route.method == "POST" else None)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("route", TABLE.routes, ids=NAME)
def test_route_by_root_path_and_key(plain: LiveServer, below: LiveServer, route: Route, key: str) -> None:
    expected = asked(plain, route, "", key)
    assert (expected.status_code == 401) == (key != "right" and route.access in ("key", "admin"))
    for prefix in ("", ROOT):
        reply = asked(below, route, prefix, key)
        assert reply.status_code == expected.status_code, prefix
        if reply.status_code >= 400:
            assert reply.content == expected.content
            msgspec.json.decode(reply.content, type=route.dialect.shape)


@pytest.mark.parametrize("route", [r for r in TABLE.routes if r.access in ("public", "monitoring")], ids=NAME)
def test_keyless_route_where_metrics_are_protected(protected: LiveServer, route: Route) -> None:
    assert asked(protected, route, "", "right").status_code < 400
    assert (asked(protected, route, "", "none").status_code == 401) == (route.access == "monitoring")


@pytest.mark.parametrize("route", [route for route in TABLE.routes if route.body], ids=NAME)
def test_route_that_is_sent_no_object(plain: LiveServer, route: Route) -> None:
    """An error of a body is said in the dialect of its route, of a model that is not there as well."""
    for content in (b"[", b"[1]", b'{"model": "nobody"}'):
        headers = KEYS["right"] | {"content-type": "application/json"}
        reply = plain.http.post(route.path, content=content, headers=headers)
        assert 400 <= reply.status_code < 500
        msgspec.json.decode(reply.content, type=route.dialect.shape)


def test_dialects_of_paths_without_a_route() -> None:
    assert TABLE.dialect("/api/nothing") is OLLAMA and TABLE.dialect("/apix") is OPENAI
    assert TABLE.dialect("/") is TGI and TABLE.dialect("/v1/messages/batches") is OPENAI
    assert {route.dialect for route in TABLE.routes} == set(DIALECTS)


def test_a_path_with_parameters_is_found_by_what_is_sent() -> None:
    assert [route.method for route in TABLE.at("/v1/responses/resp_1")] == ["GET", "DELETE"]
    assert [route.path for route in TABLE.at("/v1/models/a/b")] == ["/v1/models/{model:path}"]
    assert TABLE.at("/v1/responses/a/b") == ()


def test_records_agree_with_themselves() -> None:
    names = [(route.method, route.path) for route in TABLE.routes]
    assert len(set(names)) == len(names)
    for path in {route.path for route in TABLE.routes}:
        assert len({route.dialect for route in TABLE.at(path)}) == 1, "errors of a path have one shape"
    for route in TABLE.routes:
        assert route.summary.endswith((".", ")")) and route.handler.__doc__
        assert not (route.stream or route.operation or route.batchable) or route.generates
        assert not route.body or route.method == "POST"
        assert not route.generates or route.per_model, "what generates is a model's"


def test_a_batch_asks_what_is_neither_a_conversation_nor_stored() -> None:
    vectors = {"/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"}
    classes = {"/v1/classify", "/classify"}
    assert {"/v1/completions", "/v1/chat/completions", *vectors, *classes} == URLS


def test_no_path_is_said_beside_its_route() -> None:
    """A string that is a route's path is in the `ROUTES` of a module and nowhere else. "/" alone is other things, too:
    the root of an address, and where the playground lies."""
    paths = {route.path for route in TABLE.routes} - {"/"}
    found, declared = [], []
    for file in sorted(SERVER.rglob("*.py")):
        for statement in ast.parse(file.read_text()).body:
            names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and node.value in paths:
                    said = (declared if names == ["ROUTES"] else found).append
                    said(f"{file.relative_to(SERVER)}:{node.lineno} {node.value}")
    assert not found, "\n".join(found)
    assert len(declared) == len(TABLE.routes) - 1
