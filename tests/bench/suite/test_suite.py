"""The benchmark suite: its file, what it puts out, turns, rows that are there, and engines that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paths import BENCHMARKS, SUPPORT
from quire.bench.suite import run, session
from quire.bench.suite.cases import matches
from quire.bench.suite.compared import lines, pairs
from quire.bench.suite.engines import FOREIGN, EngineJob, command_of, name_of
from quire.bench.suite.models import source_of
from quire.bench.suite.process import Command, Died, Process
from quire.bench.suite.spec import Suite, parse_arrivals, read_suite
from quire.bench.suite.techniques import TECHNIQUES
from quire.bench.suite.watch import Energy, peak_bytes
from quire.core.errors import ConfigError
from quire.engine.engine_options import engine_config
from quire.figures.files import read_rows
from quire.figures.metrics import METRICS
from quire.figures.schema import FigureRow

STUB = SUPPORT / "stub_peer.py"


def suite_of(tmp_path: Path, text: str, head: str = 'name = "a"\nrounds = 2\n') -> tuple[Path, Suite]:
    file = tmp_path / "suite.toml"
    file.write_text(head + text)
    return file, read_suite(file)


GRID = '[[grid]]\nmodels = ["micro"]\ninput = [8]\noutput = [4]\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[gird]]\nmodels = ["micro"]\n', "gird: there is no such key; is it grid"),
        ('[[grid]]\ntechnique = ["none"]\n', "grid 1: technique: there is no such key; is it techniques"),
        ('[[grid]]\ntechniques = ["kvcache"]\n', "'kvcache' is not known; is it kv-cache"),
        ('[[grid]]\nformats = ["int5"]\n', "'int5' is not known; is it int"),
        ('[[grid]]\nengines = ["lama.cpp"]\n', "is it llama.cpp"),
        ('[[grid]]\narrivals = ["poisson"]\n', "is followed by a rate"),
        ('[[grid]]\narrivals = ["possion:2"]\n', "known are"),
        ('[[grid]]\ninput = ["9:3"]\n', "needs 1 <= low <= high"),
        ("[[grid]]\nbatch = []\n", "batch is empty"),
        ("[[grid]]\nbatch = [0]\n", "batch 0 must lie in [1, 1024]"),
        ("[[grid]]\noptions = {blocksize = 16}\n", "is it block_size"),
        ('[[grid]]\noptions = {model = "x"}\n', "said by `models`"),
        ('[[grid]]\ntechniques = ["draft"]\n', "say what drafts"),
        ('[[grid]]\nengines = ["vllm"]\ntechniques = ["capture"]\n', "in quire alone"),
        ('[[grid]]\n[[exclude]]\nmodels = "a"\n', "is it model"),
        ("", "there is no"),
        ("grid = 3\n", "there is no"),
        ("[[grid", "not TOML"),
    ],
)
def test_a_wrong_suite_names_what_was_meant(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("[", r"\[")):
        suite_of(tmp_path, text)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_suite(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="directory"):
        read_suite(tmp_path)


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "suites").glob("*.toml")), ids=lambda f: f.name)
def test_committed_suites_read_and_are_options_of_quire(file: Path, tmp_path: Path) -> None:
    suite = read_suite(file)
    sources = {name: source_of(name, tmp_path) for grid in suite.grid for name in grid.models}
    made = matches(suite, sources)
    assert made
    for match in made:
        for variant in match.variants:
            if variant.engine == "quire":
                own = {"load_format": "auto"} if "kv_store" in variant.options else {}  # weights that are written first
                engine_config(variant.source.options | variant.options | own)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_is_options_of_quire_on_and_off(name: str, tmp_path: Path) -> None:
    drafts = '[speculation.micro]\nmethod = "ngram"\n' if name == "draft" else ""
    _, suite = suite_of(tmp_path, f'{GRID}techniques = ["{name}"]\n{drafts}')
    [match] = matches(suite, {"micro": source_of("micro", tmp_path)})
    off, on = match.variants
    assert (off.on, on.on) == (False, True) and match.technique is TECHNIQUES[name]
    assert (off.options, off.mode) != (on.options, on.mode) and TECHNIQUES[name].improves in METRICS
    own = {"load_format": "auto"} if name == "kv-store" else {}  # what made-up weights compute is not kept
    for variant in match.variants:
        engine_config(variant.source.options | variant.options | own)


def test_a_grid_is_a_product_less_what_is_excluded(tmp_path: Path) -> None:
    text = """
[[grid]]
models = ["micro", "tiny"]
formats = ["int8", "int4"]
techniques = ["none", "capture"]
engines = ["quire", "transformers", "x=http://127.0.0.1:1"]
batch = [1, 2]
input = [8]
output = [4]
[[exclude]]
technique = "capture"
batch = [2]
[[exclude]]
engine = "transformers"
format = ["int8"]
"""
    _, suite = suite_of(tmp_path, text)
    made = matches(suite, {name: source_of(name, tmp_path) for name in ("micro", "tiny")})
    kinds = Counter((m.variants[0].technique, m.variants[0].format, len(m.variants)) for m in made)
    assert kinds == {("", "int8", 2): 4, ("", "int4", 3): 4, ("capture", "int8", 2): 2, ("capture", "int4", 2): 2}
    assert {name_of(v.engine) for m in made for v in m.variants} == {"quire", "transformers", "x"}


def test_arrivals() -> None:
    assert parse_arrivals("constant:4", "").due(3, 0) == [0, 0.25, 0.5]
    ramp = parse_arrivals("ramp:1:4", "")
    gaps = [b - a for a, b in zip(ramp.due(5, 0), ramp.due(5, 0)[1:], strict=False)]
    assert gaps[0] == 1 and gaps[-1] == pytest.approx(0.25) and ramp.rate == 2.5
    drawn = parse_arrivals("gamma:10:0.5", "").due(2000, 1)
    assert drawn[-1] / 1999 == pytest.approx(0.1, rel=0.15) and drawn == parse_arrivals("gamma:10:0.5", "").due(2000, 1)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Engines are stubs: what each does by "engine on|off". No probe of the machine."""
    how: dict[str, str] = {}

    def command(engine: str, job: EngineJob) -> Command:
        name = f"{engine} {'eager' if job.options.get('enforce_eager') else 'plain'}"
        return Command([sys.executable, str(STUB), str(FOREIGN), str(tmp_path / "log"), name, how.get(name, "good")])

    monkeypatch.setattr(run, "command_of", command)
    monkeypatch.setattr(run, "PAUSE", 0.0)
    monkeypatch.setattr(run.Bench, "_limits", lambda self: [{"read_bytes_per_s": 1e10}])
    return how


def measured(tmp_path: Path, text: str, **more: Any) -> list[FigureRow]:
    file, suite = suite_of(tmp_path, text)
    asked = {"only": "", "retry": False, "make": False} | more
    return session.run_suite(file, suite, tmp_path / "rows.jsonl", tmp_path / "work", **asked)


PAIR = f'{GRID}techniques = ["capture"]\nengines = ["quire"]\nbatch = [2]\n'


def test_on_and_off_take_turns_and_become_rows(stubbed: dict[str, str], tmp_path: Path) -> None:
    off, on = measured(tmp_path, PAIR)
    # One load of each to warm up, then two rounds.
    assert (tmp_path / "log").read_text().split("\n")[:-1] == ["quire eager", "quire plain"] * 3
    assert (off.on, on.on, on.technique, on.suite) == (False, True, "capture", "a")
    assert on.options["num_blocks"] and off.options["enforce_eager"] is True
    assert on.metrics["decode_tokens_per_s"] > 0 and on.metrics["weight_bytes"] == 100
    assert on.metrics["kv_waste"] == 0.25 and on.metrics["failed"] == 0 and on.metrics["peak_bytes"] > 0
    assert len(on.samples["tpot_ms_p50"]) == 2 and on.intervals["tpot_ms_p50"].low > 0
    assert on.machine.limits == {"read_bytes_per_s": 1e10} and on.metrics.keys() <= METRICS.keys()
    assert any("2 rounds" in note for note in on.notes) and on.key in on.command
    [pair] = pairs([on, off])
    assert pair.ratio("decode_tokens_per_s") is not None and pair.metric == "decode_tokens_per_s"
    assert any(line.startswith("capture: micro, 2 x 8 -> 4") for line in lines([on, off]))


def test_rows_that_are_there_are_not_measured_again(stubbed: dict[str, str], tmp_path: Path) -> None:
    first = measured(tmp_path, PAIR)
    loads = (tmp_path / "log").read_text()
    assert measured(tmp_path, PAIR) == first
    assert (tmp_path / "log").read_text() == loads
    out = tmp_path / "rows.jsonl"
    out.write_bytes(out.read_bytes()[:-100])  # as a kill amid the second row leaves it
    again = measured(tmp_path, PAIR)
    assert [row.key for row in again] == [row.key for row in first] and again[0] == first[0]
    assert len(read_rows(out)) == 2


def test_only_names_one_row(stubbed: dict[str, str], tmp_path: Path) -> None:
    text = PAIR.replace("[2]", "[1, 2]")
    rows = measured(tmp_path, text)
    (tmp_path / "rows.jsonl").unlink()
    again = measured(tmp_path, text, only=rows[3].key[:8])
    assert [row.key for row in again] == [rows[2].key, rows[3].key]
    with pytest.raises(ConfigError, match="no row"):
        measured(tmp_path, text, only="zz")


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("refuses", "--this is refused"),
        ("dies", "signal SIGKILL: out of memory, say"),
        ("hangs", "did not answer in time"),
        ("errs", "MemoryError: no room"),
    ],
)
def test_an_engine_that_fails_is_a_row_with_a_note(
    stubbed: dict[str, str], tmp_path: Path, how: str, note: str
) -> None:
    stubbed["quire eager"] = how
    text = "limit_s = 2.0\n" + PAIR
    off, on = measured(tmp_path, text)
    assert not off.metrics and note in off.notes[0] and on.metrics["output_tokens_per_s"] > 0
    assert measured(tmp_path, text) == [off, on]
    del stubbed["quire eager"]
    again = measured(tmp_path, text, retry=True)
    assert all(row.metrics for row in again) and len(read_rows(tmp_path / "rows.jsonl")) == 2


def test_a_peer_without_an_environment_is_a_row_with_a_note(
    monkeypatch: pytest.MonkeyPatch, stubbed: dict[str, str], tmp_path: Path
) -> None:
    stub = run.command_of

    def command(engine: str, job: EngineJob) -> Command:
        return stub(engine, job) if engine == "quire" else command_of(engine, job)

    monkeypatch.setattr(run, "command_of", command)
    text = f'{GRID}formats = ["int4"]\nengines = ["quire", "llama.cpp", "openvino", "vllm", "transformers"]\n'
    rows = measured(tmp_path, text)
    assert [bool(row.metrics) for row in rows] == [True, False, False, False, False]
    assert "--make-peers" in rows[1].notes[0] and "bfloat16" in rows[3].notes[0]


def test_a_process_that_says_no_word_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Died, match="did not answer in time"):
        Process("sleeper", Command([sys.executable, "-c", "import time; time.sleep(60)"]), tmp_path / "log", 0.5)
    with pytest.raises(Died, match="exit code 3: gone"):
        Process("gone", Command([sys.executable, "-c", "import sys; print('gone', file=sys.stderr); sys.exit(3)"]),
                tmp_path / "log")  # fmt: skip


def test_a_suite_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C: one line, exit code 130, and the measured process is gone."""
    script = tmp_path / "run.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "from quire.bench.suite import run\n"
        "from quire.bench.suite.process import Command\n"
        "from quire.cli import main\n"
        f"words = [sys.executable, {str(STUB)!r}, {str(FOREIGN)!r}, {str(tmp_path / 'log')!r}, 'stub', 'hangs']\n"
        "run.command_of = lambda engine, job: Command(words)\n"
        "run.Bench._limits = lambda self: []\n"
        "main()\n"
    )
    (tmp_path / "suite.toml").write_text('name = "a"\n' + GRID)
    words = [
        "bench",
        "suite",
        str(tmp_path / "suite.toml"),
        "-o",
        str(tmp_path / "rows.jsonl"),
        "--work",
        str(tmp_path),
    ]
    process = subprocess.Popen([sys.executable, str(script), *words], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "log"
    while not log.exists() or log.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(log).encode() in _read(p)]
    assert not left
    assert not (tmp_path / "rows.jsonl").exists()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_energy_is_counted_around_the_end_of_a_counter(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    for folder in (zone, tmp_path / "intel-rapl:0:0"):
        folder.mkdir()
        (folder / "energy_uj").write_text("9000000")
        (folder / "max_energy_range_uj").write_text("10000000")
        (folder / "name").write_text("package-0\n")
    energy = Energy(tmp_path)
    assert energy.sources[:1] == ["RAPL package-0"] and not energy.why
    (zone / "energy_uj").write_text("2000000")
    assert energy.joules() == pytest.approx(3.0)
    assert "no readable counter" in Energy(tmp_path / "none").why or Energy(tmp_path / "none").sources == ["NVML"]


def test_memory_of_a_process_and_of_those_it_started() -> None:
    words = [sys.executable, "-c", "import subprocess, sys, time; x = bytearray(64 << 20);"
             "p = subprocess.Popen(['sleep', '60']); print('up', flush=True); sys.stdin.read(); p.kill()"]  # fmt: skip
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        peak, count = peak_bytes(process.pid)
        process.stdin.close()
    assert count == 2 and peak > 64 << 20
    assert peak_bytes(2**22 + os.getpid()) == (0, 0)
