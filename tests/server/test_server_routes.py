"""What a server answers beside its routes: other methods and paths, bodies that are none; how it describes routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from live_server import LiveServer, live
from quire.server.routes import TABLE

PATHS = sorted({route.path for route in TABLE.routes})
JSON = {"content-type": "application/json"}
NAMES_OF_MODELS = ("/v1/models/load", "/v1/models/unload")
"""Paths that a GET takes for the address of a model of that name."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as found:
        yield found


def methods_of(path: str) -> set[str]:
    """Those that a path is offered to."""
    found = {route.method for route in TABLE.at(path)} | ({"GET"} if path == "/" or path in NAMES_OF_MODELS else set())
    return found | ({"HEAD"} if "GET" in found else set())


def url_of(path: str) -> str:
    """A path with names in the places for them."""
    return re.sub(r"{[^}]*}", "stub", path)


@pytest.mark.parametrize("path", PATHS)
def test_methods_that_a_path_is_not_offered_to(server: LiveServer, path: str) -> None:
    offered = methods_of(path)
    if "{model" in path:
        return  # below it lie others
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - offered:
        reply = server.http.request(method, url_of(path))
        assert reply.status_code == 405, method
        assert set(reply.headers["allow"].split(", ")) == offered, method
        assert reply.headers["content-type"] == "application/json"
        if method != "HEAD":
            shape = TABLE.dialect(path).shape.__struct_fields__
            assert set(reply.json()) <= set(shape) and f"{method} is not offered here" in reply.text


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/redoc", "/favicon.ico", "/v1//models"])
def test_paths_that_there_are_not(server: LiveServer, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        reply = server.http.request(method, path)
        assert reply.status_code == 404
        assert reply.json() == {
            "error": {
                "message": f"there is no route '{path}'; /openapi.json lists all",
                "type": "not_found_error",
                "param": None,
                "code": "not_found",
            }
        }


@pytest.mark.parametrize(("path", "meant"), [("/models", "/v1/models"), ("/embedding", "/v1/embeddings")])
def test_paths_without_their_first_part(server: LiveServer, path: str, meant: str) -> None:
    reply = server.http.post(path)
    assert reply.status_code == 404 and f"did you mean {meant}?" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", [path for path in PATHS if "{" not in path and path not in ("/", "/v1/models", *NAMES_OF_MODELS)]
)
def test_a_slash_behind_a_path_is_sent_to_the_path(server: LiveServer, path: str) -> None:
    reply = server.http.get(f"{path}/?a=b")
    assert reply.status_code == 307 and reply.headers["location"] == f"{server.url}{path}?a=b"


@pytest.mark.parametrize("path", [r.path for r in TABLE.routes if r.method == "GET" and r.path != "/metrics"])
def test_head_is_get_without_its_body(server: LiveServer, path: str) -> None:
    head, get = server.http.head(url_of(path)), server.http.get(url_of(path))
    assert head.status_code == get.status_code and head.content == b""
    assert head.headers.get("content-type") == get.headers.get("content-type")


@pytest.mark.parametrize("path", sorted({route.path for route in TABLE.routes if route.method == "POST"}))
def test_bodies_that_are_none(server: LiveServer, path: str) -> None:
    described = server.http.get("/openapi.json").json()["paths"][path.replace(":path", "")]["post"]
    if "requestBody" not in described:
        return
    error, form = TABLE.dialect(path), "multipart/form-data" in described["requestBody"]["content"]
    headers = {"content-type": "multipart/form-data; boundary=x"} if form else JSON
    for content in (b"{", b"[1]", b"", b"nonsense"):
        reply = server.http.post(path, content=content, headers=headers)
        assert reply.status_code in (400, 403), content  # 403: adapters may not be changed here
        assert set(reply.json()) <= set(error.shape.__struct_fields__)
    plain = server.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    said = (400, 403, 404, 422) if error.untyped else (400,) if form else (403, 415)  # a model of text hears nothing
    assert plain.status_code in said


def test_every_route_is_described(server: LiveServer) -> None:
    reply = server.http.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    found = reply.json()
    assert list(found) == ["openapi", "info", "paths", "components"] and found["info"]["title"] == "quire"
    described = {(verb.upper(), path) for path, verbs in found["paths"].items() for verb in verbs}
    assert described == {(route.method, route.shown_path) for route in TABLE.routes}
    for route in TABLE.routes:
        operation = found["paths"][route.shown_path][route.method.lower()]
        assert operation["summary"] == (route.handler.__doc__ or "").splitlines()[0]
    names = [operation["operationId"] for verbs in found["paths"].values() for operation in verbs.values()]
    assert len(set(names)) == len(names) and {"get_v1_models_model", "post_v1_chat_completions", "post_"} <= set(names)
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found)))
    assert refs and refs <= set(found["components"]["schemas"])


def test_a_description_below_a_path_names_it() -> None:
    with live(root_path="/some/where") as server:
        for prefix in ("", "/some/where"):
            assert server.http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/some/where"}]
