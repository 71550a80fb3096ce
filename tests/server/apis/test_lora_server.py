"""LoRA adapters loaded and unloaded over HTTP, in vLLM's shape, by an engine in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live
from lora_adapters import write_server_adapter as write_adapter
from quire.engine.engine_options import engine_config
from quire.engine.processes.process import ProcessEngine
from quire.server.server_options import ServerOptions

PROMPT = "What is a list? " * 9


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = engine_config({"model": "", "enable_lora": True, "max_loras": 1, "num_blocks": 64})
    running = LiveServer(ProcessEngine(config), ServerOptions(port=0, allow_runtime_lora_updating=True))  # type: ignore[arg-type]
    running.start()
    yield running
    running.stop()


def names(server: LiveServer) -> list[str]:
    return [card["id"] for card in server.http.get("/v1/models").json()["data"]]


def text(server: LiveServer, model: str | None = None) -> str:
    found: str = server.complete("What is a list? " * 9, model=model, max_tokens=12, temperature=0)["choices"][0][
        "text"
    ]
    return found


def change(server: LiveServer, what: str, **body: Any) -> tuple[int, str]:
    reply = server.post(f"/v1/{what}_lora_adapter", body)
    return reply.status_code, reply.text


def test_adapters_come_and_go(server: LiveServer, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2, rank=2, roles=("v_proj",))
    plain = text(server)
    assert change(server, "load", lora_name="mine", lora_path=one) == (
        200, "Success: LoRA adapter 'mine' added successfully.",
    )  # fmt: skip
    assert names(server)[1:] == ["mine"]
    empty = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}'
    assert empty in server.http.get("/metrics").text
    with server.http.stream(
        "POST", "/v1/completions",
        # Four have room in 64 blocks to their end; where one is preempted, the adapter is one that waits as well.
        json={"prompt": ["x"] * 4, "model": "mine", "max_tokens": 200, "ignore_eos": True, "stream": True},
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()  # kept: without it the connection is closed, and the requests are aborted
        next(lines)
        assert (
            empty.replace('running_lora_adapters=""', 'running_lora_adapters="mine"')
            in server.http.get("/metrics").text
        )
    first = text(server, "mine")
    assert first != plain and text(server) == plain
    status, why = change(server, "load", lora_name="mine", lora_path=two)
    assert status == 400 and "load_inplace" in why
    status, why = change(server, "load", lora_name="other", lora_path=two)
    assert status == 400 and "no room" in why
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "adapter_config.json").write_text("secret")
    (tmp_path / "file").write_text("x")
    for bad in ("missing", "there", "file", "file/below", "there/adapter_config.json"):
        folder = str(tmp_path / bad)
        status, why = change(server, "load", lora_name="mine", lora_path=folder, load_inplace=True)
        assert status == 400 and f"{folder}: no adapter can be read there; the log" in why and "secret" not in why
    for bad in (str(tmp_path / "missing"), write_adapter(tmp_path / "large", 3, rank=32)):
        status, why = change(server, "load", lora_name="mine", lora_path=bad, load_inplace=True)
        assert status == 400 and bad in why
        assert names(server)[1:] == ["mine"] and text(server, "mine") == first, "the old one stays"
    assert change(server, "load", lora_name="mine", lora_path=two, load_inplace=True)[0] == 200
    second = text(server, "mine")
    assert second not in (first, plain), "the new adapter's text, not what the old one left in slot or prefix cache"
    assert change(server, "unload", lora_name="mine")[0] == 200
    assert names(server)[1:] == []
    assert server.post("/v1/completions", {"prompt": "x", "model": "mine"}).status_code == 404
    assert change(server, "load", lora_name="again", lora_path=two)[0] == 200
    assert text(server, "again") == second and text(server) == plain
    assert change(server, "unload", lora_name="again", lora_int_id=1)[0] == 200


def test_adapters_with_magnitudes_come_and_go(server: LiveServer, tmp_path: Path) -> None:
    one, two = (write_adapter(tmp_path / str(seed), seed, use_dora=seed == 1) for seed in (1, 2))
    broken = write_adapter(tmp_path / "broken", 3, lora_bias=True)
    plain = text(server)
    assert change(server, "load", lora_name="mine", lora_path=one)[0] == 200
    first = text(server, "mine")
    status, why = change(server, "load", lora_name="mine", lora_path=broken, load_inplace=True)
    assert status == 400 and "against lora_bias" in why and text(server, "mine") == first, "the old one stays"
    assert change(server, "load", lora_name="mine", lora_path=two, load_inplace=True)[0] == 200
    second = text(server, "mine")
    assert change(server, "load", lora_name="mine", lora_path=one, load_inplace=True)[0] == 200
    assert text(server, "mine") == first and len({plain, first, second}) == 3
    assert change(server, "unload", lora_name="mine")[0] == 200 and text(server) == plain


def test_what_cannot_be_done_is_said(server: LiveServer, tmp_path: Path) -> None:
    assert change(server, "unload", lora_name="nobody")[0] == 404
    status, why = change(server, "load", lora_name="mine", lora_path=str(tmp_path / "missing"))
    assert status == 400 and "no adapter can be read there" in why
    (tmp_path / "odd" / "adapter_config.json").mkdir(parents=True)
    for path in ("~nobody-of-that-name/x", "\0", str(tmp_path / "odd")):
        status, why = change(server, "load", lora_name="mine", lora_path=path)
        assert status == 400 and server.engine.healthy, why
    status, why = change(server, "load", lora_name="pydoc", lora_path="x")
    assert status == 400 and "own name" in why
    assert change(server, "load", lora_name="", lora_path="x")[0] == 400
    assert change(server, "load", lora_name="mine", lora_path="x", rank=3)[0] == 400
    assert names(server)[1:] == []


def test_nobody_changes_adapters_unless_the_server_allows_it() -> None:
    with live() as server:
        status, why = change(server, "load", lora_name="mine", lora_path="x")
        assert status == 403 and "--allow-runtime-lora-updating" in why
