"""A server below a path (`--root-path`), behind a proxy that takes the path away and behind one that does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import LiveServer, live
from quire.core.errors import ConfigError
from quire.server.routes import TABLE
from quire.server.server_options import ServerOptions

ROOT = "/some/where"
POSTS = sorted({route.path for route in TABLE.routes if route.method == "POST" and "{" not in route.path})
GETS = sorted({route.path for route in TABLE.routes if route.method == "GET" and "{" not in route.path})


@pytest.fixture(scope="module", params=[ROOT, "/x"])
def below(request: pytest.FixtureRequest) -> Iterator[tuple[LiveServer, str]]:
    with live(root_path=request.param, api_key=("k",)) as server:
        server.http.headers["authorization"] = "Bearer k"
        yield server, request.param


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with live(api_key=("k",)) as server:
        server.http.headers["authorization"] = "Bearer k"
        yield server


@pytest.mark.parametrize("path", POSTS)
def test_every_route_answers_errors_as_without_it(below: tuple[LiveServer, str], plain: LiveServer, path: str) -> None:
    server, root = below
    for content, kind in ((b"[", "application/json"), (b"{}", "application/json"), (b"{}", "text/plain")):
        headers = {"content-type": kind}
        expected = plain.http.post(path, content=content, headers=headers)
        for prefix in ("", root):
            reply = server.http.post(prefix + path, content=content, headers=headers)
            assert (reply.status_code, reply.content) == (expected.status_code, expected.content), prefix
            if reply.status_code >= 400:
                assert set(reply.json()) <= set(TABLE.dialect(path).shape.__struct_fields__)


@pytest.mark.parametrize("path", GETS)
def test_every_page_is_found(below: tuple[LiveServer, str], plain: LiveServer, path: str) -> None:
    server, root = below
    for prefix in ("", root):
        assert server.http.get(prefix + path).status_code == plain.http.get(path).status_code
    for given in ("", "Bearer wrong"):
        headers = {"authorization": given}
        expected = plain.http.get(path, headers=headers).status_code
        assert {server.http.get(p + path, headers=headers).status_code for p in ("", root)} == {expected}


def test_every_api_answers(below: tuple[LiveServer, str]) -> None:
    server, root = below
    said = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": said, "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
        "/v1/messages": {"model": "stub", "messages": said, "max_tokens": 1},
        "/api/chat": {"model": "stub", "messages": said, "options": {"num_predict": 1}},
        "/completion": {"prompt": "a", "n_predict": 1},
        "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
        "/tokenize": {"prompt": "a"},
    }
    for path, body in bodies.items():
        for prefix in ("", root):
            assert server.post(prefix + path, body).status_code == 200, prefix + path
    assert server.http.get(f"{root}/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get(f"{root}x/livez").status_code == 404, "only whole parts of a path are the root's"


@pytest.mark.parametrize("root", ["x", "/x/", "//x", "/x y", "/é"])
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="root-path"):
        ServerOptions(root_path=root).validate()


def test_a_path_that_routes_begin_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="/v1"), live(root_path="/v1"):
        pass
