"""What a suite file adds: its own techniques, models that `quire compress` makes, other checkouts, started servers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.bench.suite import engines, run, session
from quire.bench.suite.cases import Match, matches
from quire.bench.suite.compared import beside
from quire.bench.suite.engines import EngineJob, checkout_of, command_of, name_of
from quire.bench.suite.models import source_of
from quire.bench.suite.servers import server
from quire.bench.suite.spec import read_suite
from quire.bench.suite.watch import cpu_seconds, family_of
from quire.core.errors import ConfigError, EngineFailure
from quire.figures.schema import FigureRow, RowEngine

GRID = '[[grid]]\nmodels = ["micro"]\ninput = [8]\noutput = [4]\n'
OWN = """
[technique.eager]
on = {enforce_eager = true}
off = {threads = 1}
compress = ["--quantize", "rtn"]
improves = "decode_tokens_per_s"
"""


def matches_of(tmp_path: Path, text: str) -> list[Match]:
    file = tmp_path / "suite.toml"
    file.write_text('name = "a"\nrounds = 1\n' + text)
    return matches(read_suite(file), {"micro": source_of("micro", tmp_path)})


def test_a_suite_defines_techniques_of_its_own(tmp_path: Path) -> None:
    [match] = matches_of(tmp_path, f'{GRID}techniques = ["eager"]\n{OWN}')
    off, on = match.variants
    assert match.technique is not None and match.technique.improves == "decode_tokens_per_s"
    assert (off.on, off.options["threads"], off.compress) == (False, 1, ())
    assert (on.on, on.options["enforce_eager"], on.compress) == (True, True, ("--quantize", "rtn"))
    assert "enforce_eager" not in off.options and "threads" not in on.options


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (OWN.replace("enforce_eager", "enforce_eagre"), "is it enforce_eager"),
        (OWN.replace("decode_tokens_per_s", "decode_tokens"), "improves: 'decode_tokens' is not known"),
        (OWN.replace("technique.eager", "technique.capture"), "every suite has a technique of this name"),
        (OWN.replace("improves", "improve"), "improve: there is no such key; is it improves"),
        ("[technique]\neager = 1\n", "as in .technique.NAME"),
        (f'{GRID}techniques = ["kv-cache"]\nserve = true\n', "a server cannot be driven"),
    ],
)
def test_a_wrong_technique_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        matches_of(tmp_path, text if "grid" in text else GRID + text)


def job_of(tmp_path: Path, **more: Any) -> EngineJob:
    return EngineJob(tmp_path, source_of("micro", tmp_path), "int8", 1, options={"threads": 1}, **more)


def test_another_checkout_is_an_engine(tmp_path: Path) -> None:
    engine = f"before={tmp_path}"
    assert name_of(engine) == "before" and checkout_of(engine) == tmp_path
    assert checkout_of("quire") is None and checkout_of("x=http://127.0.0.1:1") is None
    with pytest.raises(ConfigError, match="make build"):
        command_of(engine, job_of(tmp_path))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    words = command_of(engine, job_of(tmp_path)).words
    assert words[:3] == [str(python), "-m", "quire.bench.suite.worker"]
    [match] = matches_of(tmp_path, f'{GRID}engines = ["quire", "{engine}"]\nformats = ["int8"]\n')
    ours, theirs = match.variants
    assert theirs.is_quire and theirs.options == ours.options and theirs.options["quantization"] == "int8"


def test_engines_are_started_as_servers(tmp_path: Path) -> None:
    words = command_of("quire", job_of(tmp_path, mode="serve")).words
    assert words[:4] == [sys.executable, "-m", "quire.bench.suite.over_http", "--start"]
    served = json.loads(words[4])
    assert served[1:4] == ["-m", "quire", "serve"] and served[served.index("--threads") :][:2] == ["--threads", "1"]
    assert served[served.index("--load-format") :][:2] == ["--load-format", "dummy"]
    with pytest.raises(ConfigError, match="vllm=URL"):
        command_of("vllm", job_of(tmp_path, mode="serve"))


def test_a_technique_compresses_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is made once, from weights that are written first."""
    asked: list[list[str]] = []

    def run_command(words: list[str], **more: Any) -> Any:
        asked.append(words)
        Path(words[5]).mkdir()
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(engines.subprocess, "run", run_command)
    monkeypatch.setattr(engines, "write_checkpoint", lambda name, folder: folder.mkdir())
    job = job_of(tmp_path, compress=("--quantize", "rtn"))
    options = [json.loads(command_of("quire", job).words[3]) for _ in range(2)]
    assert options[0] == options[1] and "load_format" not in options[0] and Path(options[0]["model"]).is_dir()
    [words] = asked
    assert words[3:5] == ["compress", str(tmp_path / "micro-bf16")] and words[6:8] == ["--quantize", "rtn"]


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with pytest.raises(EngineFailure, match="no model"), server(words, {}, tmp_path / "log"):
        pass


def test_a_server_is_up_and_is_ended(tmp_path: Path) -> None:
    """A program that answers GET /health as soon as it listens."""
    program = (
        "import http.server as h, sys\n"
        "class Up(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Up).serve_forever()\n"
    )
    with server([sys.executable, "-c", program], {}, tmp_path / "log") as found:
        assert found.ready_seconds > 0 and found.cpu_seconds() > 0 and sum(found.memory().values()) > 1 << 20
        assert family_of(found.pid).keys() == {found.pid}
    assert not family_of(found.pid)


def test_processor_time_of_a_process() -> None:
    assert cpu_seconds(os.getpid()) > 0 and cpu_seconds(2**22 + os.getpid()) == 0


def rows_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[FigureRow]:
    monkeypatch.setattr(run.Bench, "_limits", lambda self: [])
    file = tmp_path / "suite.toml"
    file.write_text('name = "a"\nrounds = 1\nperplexity_bytes = 0\nmax_model_len = 256\n' + text)
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    return session.run_suite(file, read_suite(file), out, work, only="", retry=False, make=False)


@pytest.mark.slow
def test_the_embedded_model_as_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "[[grid]]\nserve = true\nbatch = [2]\ninput = [16]\noutput = [4]\noptions = {enable_prefix_caching = false}\n"
    )
    [row] = rows_of(tmp_path, text, monkeypatch)
    assert row.metrics, row.notes
    assert row.metrics["output_tokens_per_s"] > 0 and row.metrics["failed"] == 0 and row.metrics["cpu_s"] > 0
    assert row.options["mode"] == "serve" and row.metrics["peak_bytes"] > 1 << 20
    other = msgspec.structs.replace(row, engine=RowEngine(name="other"))
    assert beside([row, other]).startswith("quire / other: ") and "throughput 1.00" in beside([row, other])


@pytest.mark.slow
def test_a_compressed_model_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
[technique.rtn]
compress = ["--quantize", "rtn", "--set", "group_size=64"]
improves = "weight_bytes"
[[grid]]
techniques = ["rtn"]
input = [16]
output = [4]
"""
    off, on = rows_of(tmp_path, text, monkeypatch)
    assert on.metrics["weight_bytes"] < off.metrics["weight_bytes"] and on.model.format == "rtn"
    assert on.options["compress"] == "--quantize rtn --set group_size=64" and on.key != off.key
