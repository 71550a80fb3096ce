"""The flight recorder: what it writes, how much, for whom; and a replay that has every bit again."""

from __future__ import annotations

import io
import json
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from live_server import FOLDER, LiveServer, live
from quire.bench.replay import Replay, doubts, options_of
from quire.cli import main
from quire.core.config import EngineConfig, flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.engine.record.recorder import RecordingClient
from quire.engine.record.recording import EndLine, RequestLine, read_run, runs
from quire.server.options import ServerOptions
from quire.server.run import recorded
from stub_engine import StubEngine, expected
from test_lora_server import write_adapter
from tiny_model import OPTIONS, write_tiny

SECRETS = ("7001", "7002", "7003", "7004", "my-salt", "hush", "4321")


def request(name: str, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=6, logit_bias={4321: 1.0}, stop=("hush",), bad_words=("hush",))
    made = Request(id=name, prompt=(7001, 7002, 7003), params=params, seed=11, arrival=0.0, bad_words_ids=((7004,),))
    return replace(made, **({"cache_salt": "my-salt", "tenant": "someone"} | fields))


def record(folder: Path, prompts: bool, limit: int = 8 << 20) -> RecordingClient:
    return RecordingClient(StubEngine(), EngineConfig(), folder, prompts=prompts, limit=limit)


def finish(client: RecordingClient, polls: int = 20) -> None:
    for _ in range(polls):
        client.poll(0.0)


def text_of(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.iterdir()))


def test_without_prompts_lengths_are_written_and_no_content(tmp_path: Path) -> None:
    client = record(tmp_path / "new", prompts=False)
    for name in ("a", "b"):
        client.submit(request(name))
    client.submit(request("c", cache_salt="other", params=SamplingParams(max_tokens=3, n=2)))
    finish(client)
    client.close()
    (path,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    text = text_of(tmp_path / "new")
    tokens = {str(token) for name in ("a", "b") for token in expected(request(name))}
    assert not any(secret in text for secret in SECRETS) and not any(f"[{token}" in text for token in tokens)
    run = read_run(tmp_path / "new")
    assert [asked.prompt_tokens for asked in run.asked] == [3, 3, 3]
    salts = [asked.request.cache_salt for asked in run.asked]
    assert salts[0] == salts[1] != salts[2] and run.asked[0].request.seed == 11
    assert run.asked[0].request.tenant == "someone" and not run.asked[0].request.prompt
    assert {key: (end.reason, end.count, end.tokens) for key, end in run.ends.items()} == {
        ("a", 0): ("length", 6, None),
        ("b", 0): ("length", 6, None),
        ("c", 0): ("length", 3, None),
        ("c", 1): ("length", 3, None),
    }
    assert [asked.at for asked in run.asked] == sorted(asked.at for asked in run.asked)


def test_with_prompts_the_tokens_are_there_and_those_that_left_too(tmp_path: Path) -> None:
    client = record(tmp_path, prompts=True)
    client.submit(request("a"))
    client.submit(request("left", params=SamplingParams(max_tokens=50, n=2)))
    finish(client, 3)
    client.abort("left", 1)
    client.abort("left", 1)
    finish(client, 4)
    client.abort("left")
    client.abort("nobody")
    client.submit(request("unfinished"))
    client.close()
    run = read_run(tmp_path)
    want = run.asked[0].request
    assert want.prompt == (7001, 7002, 7003) and want.params == request("a").params
    assert run.ends["a", 0].tokens == tuple(expected(request("a"))) and run.ends["a", 0].reason == "length"
    assert run.ends["left", 1].reason == "abort" and run.ends["left", 1].count == 3
    assert run.ends["left", 0].count == 7 and len(run.ends["left", 0].tokens or ()) == 7
    assert run.asked[-1].request.id == "unfinished" and ("unfinished", 0) not in run.ends
    assert list(client._made) == list(client._counts) == ["unfinished"], "nothing is kept of what has ended"


def test_the_folder_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    limit = 64 << 10
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("20200101T000000-1-000000.jsonl", "20200101T000000-1-000001.jsonl"):
        (tmp_path / name).write_text("x" * 9000)
    client = record(tmp_path, prompts=True, limit=limit)
    for number in range(400):
        client.submit(request(str(number)))
        finish(client, 6)
    long = request("long", prompt=tuple(range(9000)))
    client.submit(long)
    finish(client, 6)
    client.close()
    files = [path for path in tmp_path.iterdir() if path.suffix == ".jsonl"]
    assert limit // 2 < sum(path.stat().st_size for path in files) <= limit
    assert not any(path.name.startswith("2020") for path in files) and (tmp_path / "notes.txt").exists()
    (name,) = runs(tmp_path)
    run = read_run(tmp_path, name)
    assert run.lost == 1 and run.asked[0].request.id != "0" and run.asked[-1].request.id == "399"
    assert ("long", 0) in run.ends


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    client = record(tmp_path, prompts=True)
    monkeypatch.setattr("quire.engine.record.recorder.os.write", full)
    for name in ("a", "b"):
        client.submit(request(name))
        finish(client, 8)
    client._segments._thread.join(5)
    client.submit(request("c"))
    finish(client, 8)
    client.close()
    assert "No space left on device; nothing more is recorded" in caplog.text and not client._made


def test_bad_recordings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no recording"):
        read_run(tmp_path)
    client = record(tmp_path, prompts=True)
    client.submit(request("a"))
    finish(client)
    client.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert len(read_run(tmp_path).asked) == 1 and not read_run(tmp_path).ends, "the last line was cut"
    path.write_bytes(whole.replace(b'"type":"end"', b'"type":"and"'))
    with pytest.raises(ConfigError, match=r"line 3: .*and"):
        read_run(tmp_path)
    path.write_bytes(whole.replace(b'"format":1', b'"format":2'))
    with pytest.raises(ConfigError, match="reads format 1"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="--run no"):
        read_run(tmp_path, "no")


def test_options_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record-prompts needs --record"):
        ServerOptions(record_prompts=True).validate()
    with pytest.raises(ConfigError, match="--record-mib"):
        ServerOptions(record="x", record_mib=1).validate()
    stub = StubEngine()
    assert recorded(stub, EngineConfig(), ServerOptions()) is stub  # type: ignore[comparison-overlap]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--record .*file"):
        recorded(stub, EngineConfig(), ServerOptions(record=str(tmp_path / "file")))


def test_a_replay_is_told_what_the_engine_was_told(tmp_path: Path) -> None:
    record(tmp_path, prompts=False).close()
    assert not list(tmp_path.iterdir()), "nothing was asked, nothing is written"
    told = flat_config(max_num_seqs=7, served_model_name=("a", "b"))
    client = RecordingClient(StubEngine(), told, tmp_path, prompts=False, limit=8 << 20)
    client.submit(request("a"))
    client.close()
    limits = {"max_model_len": 256, "num_blocks": 64}
    assert options_of(read_run(tmp_path)) == {"max_num_seqs": 7, "served_model_name": ("a", "b")} | limits


def engine_of(folder: Path, **options: Any) -> tuple[LocalEngine, EngineConfig]:
    config = flat_config(**(OPTIONS | {"model": str(folder), "max_model_len": 96} | options))
    return LocalEngine(config), config


def fill(client: RecordingClient, vocab: int) -> None:
    """Requests of all kinds, arriving while others run; some are left."""
    rng = random.Random(3)
    for number in range(12):
        params = SamplingParams(
            max_tokens=rng.randint(1, 30),
            n=1 + number % 3 // 2,
            temperature=number % 2 * 0.9,
            ignore_eos=number % 4 > 0,
        )
        prompt = tuple(rng.randrange(4, vocab) for _ in range(rng.randint(1, 50)))
        client.submit(
            Request(id=f"r{number}", prompt=prompt, params=params, seed=number, arrival=0.0, eos_token_ids=(3,))
        )
        for _ in range(rng.randint(0, 4)):
            client.poll(0.0)
        if number in (4, 7):
            client.abort(f"r{number}", 0)
    client.submit(replace(request("gone"), prompt=(5,), params=SamplingParams(max_tokens=4)))
    client.abort("gone")
    while client.poll(0.0) is not None:
        pass


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Folders of a recorded run of a tiny model, with prompts and without."""
    model = write_tiny(tmp_path_factory.mktemp("tiny"))
    made: dict[bool, Path] = {}

    def of(prompts: bool) -> Path:
        if prompts not in made:
            folder = made[prompts] = tmp_path_factory.mktemp("recorded")
            engine, config = engine_of(model)
            client = RecordingClient(engine, config, folder, prompts=prompts, limit=8 << 20)
            fill(client, engine.info.vocab_size)
            client.close()
        return made[prompts]

    return of


def replayed(folder: Path, *words: str) -> tuple[int, str]:
    """(exit code, standard output) of `quire replay`."""
    out, before, argv = io.StringIO(), sys.stdout, sys.argv
    sys.stdout, sys.argv = out, ["quire", "replay", str(folder), "--speed", "inf", *words]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout, sys.argv = before, argv
    return code, out.getvalue()


def test_a_replay_has_every_bit_again(recording: Callable[[bool], Path], tmp_path: Path) -> None:
    folder, report = recording(True), tmp_path / "report.json"
    code, out = replayed(folder, "-o", str(report))
    assert code == 0 and "16 of 16 sequences are the same, bit for bit" in out and "synthetic" not in out
    assert "1 requests were left before their first token" in out
    found = json.loads(report.read_bytes())["results"]
    assert found["replay"]["different"] == 0 and found["rates"]["completed"] == 12
    code, out = replayed(folder, "--max-num-batched-tokens", "7", "--max-num-seqs", "3", "--no-enable-prefix-caching")
    assert code == 0 and "16 of 16 sequences" in out, "no option of scheduling changes a bit"


def test_a_replay_finds_a_token_that_differs(recording: Callable[[bool], Path], tmp_path: Path) -> None:
    (path,) = recording(True).iterdir()
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"type":"end","' in line and '"id":"r3"' in line)
    end = msgspec.json.decode(lines[at], type=EndLine)
    assert end.tokens is not None
    tokens = (*end.tokens[:-1], end.tokens[-1] ^ 1)
    lines[at] = msgspec.json.encode(replace(end, tokens=tokens)).decode()
    (tmp_path / path.name).write_text("\n".join(lines) + "\n")
    code, out = replayed(tmp_path)
    assert code == 1 and "15 of 16 sequences are the same" in out
    assert f"request r3, sequence {end.index}, token {len(tokens) - 1}: {tokens[-1]} was recorded" in out


def test_a_replay_without_prompts_says_that_it_is_synthetic(recording: Callable[[bool], Path]) -> None:
    code, out = replayed(recording(False))
    assert code == 0 and "synthetic: prompts were not recorded" in out and "bit for bit" not in out
    run = read_run(recording(False))
    config = flat_config(**options_of(run))
    outcome = Replay(run, LocalEngine(config), 1000.0).go()
    whole = {asked.request.id: asked for asked in run.asked}
    assert isinstance(whole["r0"], RequestLine) and not outcome.errors and outcome.compared == 0
    counts = {i: sum(end.count for key, end in run.ends.items() if key[0] == i) for i in whole if i != "gone"}
    assert sum(record.output_tokens for record in outcome.records) == sum(counts.values())
    assert sorted(record.input_tokens for record in outcome.records) == sorted(whole[i].prompt_tokens for i in counts)


def test_what_may_change_bits_is_said(recording: Callable[[bool], Path]) -> None:
    run = read_run(recording(True))
    assert doubts(run, run.began.info) == []
    other = replace(run.began.info, isa="other")
    assert doubts(run, other) == [f"isa was {run.began.info.isa}, here it is other"]
    old = replace(run.began, version="0.0.1")
    run.began = old
    assert any(doubt.startswith("quire was 0.0.1") for doubt in doubts(run, old.info))


def test_adapters_that_came_and_went_come_and_go_again(tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    config = flat_config(model=str(FOLDER), max_model_len=128, num_blocks=32, enable_lora=True)
    client = RecordingClient(LocalEngine(config), config, tmp_path / "kept", prompts=True, limit=8 << 20)
    for number, folder in enumerate(("", one, "", two)):
        client.change_adapter("mine", folder)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        for adapter in ("", "mine") if folder else ("",):
            name = f"r{number}{adapter}"
            client.submit(Request(id=name, prompt=(9,) * 20, params=params, seed=1, arrival=0.0, adapter=adapter))
        while client.poll(0.0) is not None:
            pass
    client.close()
    run = read_run(tmp_path / "kept")
    assert [change.folder for change in run.changes] == [one, "", two], "there was nothing to unload at first"
    made = {end.tokens for (name, _), end in run.ends.items() if "mine" in name}
    assert len(made) == 2, "the adapters differ"
    outcome = Replay(run, LocalEngine(flat_config(**options_of(run))), 1e6).go()
    assert outcome.compared == 6 and not outcome.differences and not outcome.errors


def test_requests_over_http_are_recorded_and_stop_strings_end_them(tmp_path: Path) -> None:
    stub = StubEngine(step_seconds=0.01)
    client = RecordingClient(stub, EngineConfig(), tmp_path, prompts=True, limit=8 << 20)
    with live(client) as server:  # type: ignore[arg-type]
        assert isinstance(server, LiveServer)
        stub.script = server.tokenizer.encode("stop me here")
        server.complete("a", max_tokens=50, stop="me")
        server.complete("b", max_tokens=2)
    run = read_run(tmp_path)
    first, second = run.asked
    assert run.ends[first.request.id, 0].reason == "abort" and run.ends[first.request.id, 0].count >= 2
    assert run.ends[second.request.id, 0].count == 2 and first.request.params.stop == ("me",)
    assert 0 <= first.request.arrival <= first.at <= second.at
