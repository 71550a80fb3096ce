"""`quire run-batch`: OpenAI's batch files, errors by line, and a run that goes on where it was cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer
from quire.core.errors import BadRequest, ConfigError
from quire.server.batch import answered, read_line, run
from real_server import real


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(num_blocks=64) as made:
        yield made


def line(name: str, url: str, body: dict[str, Any], **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body} | more)


LINES = [
    line("a", "/v1/completions", {"prompt": "def add", "max_tokens": 3, "temperature": 0}),
    line("b", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    line("c", "/v1/embeddings", {"input": "a text"}),
    line("d", "/v1/completions", {"prompt": "x", "max_tokens": 0}),
    "not json",
    line("e", "/v1/models", {}),
    line("a", "/v1/completions", {"prompt": "again"}),
    line("f", "/v1/completions", {"prompt": "x", "stream": True}),
]


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def run_on(server: LiveServer, source: Path, target: Path) -> tuple[tuple[int, int], int]:
    """(answered, errors) and how many lines were counted. The engine's streams live on the loop of the server."""
    counted: list[bool] = []
    loop = server.engine._loop
    assert loop is not None
    job = asyncio.run_coroutine_threadsafe(run(server.app, source, target, 1 << 20, counted.append), loop)
    return job.result(60), len(counted)


def test_every_line_has_an_answer_and_a_cut_run_goes_on(server: LiveServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*LINES[:3], "", *LINES[3:]]) + "\n")
    assert run_on(server, source, target) == ((8, 5), 8)
    found = answers(target)
    good = {each["custom_id"]: each["response"]["body"] for each in found if each["error"] is None}
    assert good["a"]["choices"][0]["text"]
    assert good["b"]["choices"][0]["message"]["role"] == "assistant"
    assert len(good["c"]["data"]) == 1
    assert "max_tokens" in good["d"]["error"]["message"]
    said = {each["custom_id"] or each["id"]: each["error"]["message"] for each in found if each["error"] is not None}
    assert "line 6: " in said["batch_req_line_6"] and "JSON" in said["batch_req_line_6"]
    assert "an earlier line has 'a', too" in said["batch_req_line_8"]
    assert "url" in said["e"]
    assert "stream" in said["f"]
    whole = {each["custom_id"]: each for each in found if each["custom_id"] in ("b", "c")}
    kept = [text for text in target.read_text().splitlines(keepends=True) if json.loads(text)["custom_id"] in whole]
    target.write_text("".join(kept) + '{"id": "batch_req_cut')
    assert run_on(server, source, target)[1] == 8
    again = answers(target)
    assert {each["custom_id"]: each for each in again if each["custom_id"] in whole} == whole
    names = [each["custom_id"] for each in again]
    assert all(names.count(name) == 1 for name in "abcdef") and names.count(None) == 2


def test_a_run_that_is_repeated_adds_nothing(server: LiveServer, tmp_path: Path) -> None:
    """Every line has one line of answer, also one without an id, or with an earlier line's."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    nameless = ["[]", "{}", '{"custom_id": 7}', '{"custom_id": ""}', '{"custom_id": ""}', '"text"', "\x00"]
    source.write_text("\n".join([LINES[0], LINES[0], *nameless, LINES[0]]) + "\n")
    assert run_on(server, source, target)[0] == (10, 9)
    first = target.read_text()
    assert sum(each["custom_id"] == "a" for each in answers(target)) == 1
    assert run_on(server, source, target) == ((9, 9), 10), "errors are tried again"
    assert sorted(target.read_text().splitlines()) == sorted(first.splitlines())
    kept = [text for text in first.splitlines(keepends=True) if json.loads(text)["custom_id"] != "a"]
    target.write_text("".join(kept))
    assert run_on(server, source, target)[0] == (10, 9), "the error of a repeated id is no answer to its first line"


def test_a_changed_request_is_no_answered_one(server: LiveServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([LINES[0], LINES[3]]) + "\n")
    assert run_on(server, source, target) == ((2, 1), 2)
    before = target.read_text()
    source.write_text(LINES[0].replace("def add", "def sub") + "\n")
    with pytest.raises(ConfigError, match=r"custom_id 'a' than line 1 of .*remove that file"):
        run_on(server, source, target)
    assert target.read_text() == before
    source.write_text("\n".join([LINES[0], LINES[3].replace('"max_tokens": 0', '"max_tokens": 1')]) + "\n")
    assert run_on(server, source, target) == ((1, 0), 2), "one that had an error may change"
    assert [each["response"]["status_code"] for each in answers(target)] == [200, 200]


def test_ollamas_tag_is_read_past_on_every_route(server: LiveServer) -> None:
    name = server.service.names[0]
    ways = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/responses": {"input": "x", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/embeddings": {"input": "x"},
        "/api/generate": {"prompt": "x", "stream": False, "options": {"num_predict": 1}},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
        "/v1/score": {"text_1": "x", "text_2": "y"},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
    }
    for path, body in ways.items():
        for asked, status in ((name, 200), (f"{name}:latest", 200), (f"{name}:other", 404), (":latest", 404)):
            assert server.post(path, body | {"model": asked}).status_code == status, (path, asked)
    assert server.http.get(f"/v1/models/{name}:latest").json()["id"] == name


def test_a_file_of_another_kind_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"other": 1}\n')
    with pytest.raises(ConfigError, match="no answer of a batch"):
        answered(tmp_path / "x")
    assert (tmp_path / "x").read_text() == '{"other": 1}\n'
    with pytest.raises(BadRequest, match="custom_id"):
        read_line(b'{"url": "/v1/completions", "body": {}}')
