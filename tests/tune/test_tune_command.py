"""`quire tune` from the command line, on a tiny model: what varies, what is written, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Run
from command_line import run as run
from quire.cli.flags import to_engine
from quire.cli.serve import with_config
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.figures.files import read_rows
from quire.plan.planned_load import PlannedLoad, Slo
from quire.tune import candidate_runner, session
from quire.tune.report import MARK
from quire.tune.space import allowed_axes, check_cores, check_quality, make_space, read_space, usual_axes, varied
from tiny_model import DEVICE, write_tiny

LOAD = "batch=4,input=8,output=4"
VARY = ("--vary", "max-num-seqs=2,4", "--vary", "max-num-batched-tokens=8,512", "--vary", "block-size=8,16")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model whose steps nobody calibrates, and runs of a moment."""

    def none(*_: object, **__: object) -> None:
        raise ConfigError("not calibrated")

    monkeypatch.setattr(session, "machine_of", none)
    monkeypatch.setattr(candidate_runner, "SECONDS", 0.0)
    monkeypatch.setattr(candidate_runner, "BATCHES", 1)
    monkeypatch.chdir(tmp_path)
    folder = write_tiny(tmp_path / "tiny")
    return [str(folder), "--load-format", "dummy", "--device", DEVICE, "--dtype", "float32", "--num-blocks", "64"]


def test_a_configuration_is_found_and_a_server_takes_it(run: Run, tiny: list[str], tmp_path: Path) -> None:
    code, out, _ = run("tune", *tiny, "--load", LOAD, *VARY)
    assert code == 0 and "8 configurations predicted, 0 refused" in out.replace("\n", " ")
    text = (tmp_path / "tuned.toml").read_text()
    assert text.startswith(MARK) and LOAD in text
    written = tomllib.loads(text)
    assert written["model"] == tiny[0] and written["num-blocks"] == 64 and written["dtype"] == "float32"
    config = to_engine(with_config(str(tmp_path / "tuned.toml"), {}))
    assert config.scheduler.max_num_seqs in (2, 4) and config.cache.block_size in (8, 16)
    rows = read_rows(tmp_path / "tuned.jsonl")
    assert len({row.key for row in rows}) == len(rows) and all(row.benchmark == "tune" for row in rows)
    best = [row for row in rows if row.options["max_num_seqs"] == config.scheduler.max_num_seqs]
    assert best and all(row.metrics["output_tokens_per_s"] > 0 and row.load.batch == 4 for row in rows)
    assert all(len(row.samples["ttft_ms_mean"]) == len(row.samples["goodput_per_s"]) for row in rows)
    again, _, _ = run("tune", *tiny, "--load", LOAD, *VARY, "--budget", "0.000001")
    assert again in (0, 1) and len(read_rows(tmp_path / "tuned.jsonl")) >= len(rows)


@pytest.mark.slow
def test_replicas_and_ranks_are_started_as_a_server_does(run: Run, tiny: list[str], tmp_path: Path) -> None:
    flags = ("--vary", "data-parallel-size=1,2", "--vary", "tensor-parallel-size=1,2")
    code, _, _ = run("tune", *tiny, "--load", LOAD, *flags)
    rows = read_rows(tmp_path / "tuned.jsonl")
    assert code == 0 and {row.options["data_parallel_size"] for row in rows} == {1, 2}


def test_an_interrupt_leaves_the_best_so_far(
    run: Run,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once, calls = candidate_runner.CandidateRunner.run, list[int]()

    def interrupted(*args: Any) -> dict[str, float]:
        calls.append(args[2])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return once(*args)

    monkeypatch.setattr(candidate_runner.CandidateRunner, "run", interrupted)
    code, out, err = run("tune", *tiny, "--load", LOAD, *VARY)
    assert code == 130 and "not to the end: interrupted; run again" in out and "Traceback" not in out + err
    assert "The search did not end" in (tmp_path / "tuned.toml").read_text()
    assert len(read_rows(tmp_path / "tuned.jsonl")) == 3


def test_the_budget_ends_calibration(run: Run, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list[int]()

    def endless(*_: object, before_part: Callable[[], None], **__: object) -> None:
        while len(parts) < 1000:
            before_part()
            parts.append(len(parts))

    monkeypatch.setattr(session, "machine_of", endless)
    code, out, _ = run("tune", *tiny, "--load", LOAD, *VARY, "--budget", "0.00001")
    assert code == 1 and "the budget of 1e-05 s was spent" in out and len(parts) < 1000


def test_targets_that_none_keeps(run: Run, tiny: list[str], tmp_path: Path) -> None:
    one = ("--vary", "max-num-seqs=4")
    code, out, _ = run("tune", *tiny, "--load", LOAD, "--slo", "ttft=0.0001", *one, "--output", "x.toml")
    assert code == 1 and "no configuration keeps the targets; the closest has ttft_ms_mean" in out
    assert "IT MISSES A TARGET" in (tmp_path / "x.toml").read_text()
    code, out, _ = run(
        "tune", *tiny, "--load", "rate=100,input=8,output=4", *one, "--slo-at", "p99", "--slo", "itl=1e6"
    )
    assert code == 0 and "e2e ms p99" in out.replace("\n", " ")


def test_formats_that_change_answers_are_marked(run: Run, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abc abc abc\nhello\n")
    flags = ("--vary", "speculative-config=off,ngram", "--prompts", "p.txt", "--allow", "kv=int8")
    code, _, _ = run("tune", *tiny, "--load", LOAD, *flags)
    rows = read_rows(tmp_path / "tuned.jsonl")
    assert code == 0 and {row.options["kv_cache_dtype"] for row in rows} == {"auto", "int8"}
    assert {row.options["speculative_config"] for row in rows} == {"none", "ngram"}
    text = (tmp_path / "tuned.toml").read_text()
    assert ('kv-cache-dtype = "int8"  # changes answers' in text) == ('kv-cache-dtype = "int8"' in text)
    to_engine(with_config(str(tmp_path / "tuned.toml"), {}))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "batch=0"], "--load batch=0"),
        (["--slo", "ttft"], "--slo"),
        (["--objective", "speed"], "--objective 'speed'"),
        (["--objective", "goodput"], "give --slo"),
        (["--objective", "itl", "--load", "output=1"], "output=2 or more"),
        (["--allow", "int9"], "--allow int9"),
        (["--vary", "quantization=none,int8"], "add --allow int8"),
        (["--vary", "port=1,2"], "port: there is no such option to vary"),
        (["--vary", "block-size=16", "--block-size", "16"], "block-size: given, and to be tried too"),
        (["--vary", "block-size=x"], "block-size"),
        (["--vary", "block-size=3"], "must be a power of two"),
        (["--space", "none.toml"], "none.toml: No such file"),
        (["--output", "x.json"], "a .toml file"),
        (["--output", "taken.toml"], "quire tune did not write"),
        (["--load", "batch=1,input=4096,output=1", "--vary", "block-size=16"], "the context holds 128"),
        (["--prompts", "none.txt", "--vary", "block-size=16"], "none.txt: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    run: Run,
    tiny: list[str],
    tmp_path: Path,
    flags: list[str],
    words: str,
) -> None:
    (tmp_path / "taken.toml").write_text("mine = 1\n")
    code, _, err = run("tune", *tiny, *flags)
    assert code == 2 and words in err and "Traceback" not in err, err


def test_the_usual_space_follows_load_and_machine() -> None:
    axes = usual_axes(flat_config(), PlannedLoad(batch=16, input=100, output=10), Slo(), False, False)
    assert axes["max_num_seqs"] == (4, 8, 16) and axes["max_num_batched_tokens"] == (128, 256, 512, 1024, 2048)
    assert not {"enable_prefix_caching", "target_itl_ms", "bf16_bits", "speculative_config"} & set(axes)
    more = usual_axes(flat_config(), PlannedLoad(rate=2.0, input=100, output=10, shared=50), Slo(itl=10.0), True, True)
    assert {"enable_prefix_caching", "target_itl_ms", "bf16_bits", "speculative_config"} <= set(more)
    assert more["max_num_seqs"][-1] == 256 and more["target_itl_ms"] == (0.0, 8.0)


def test_spaces_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'max-num-seqs = [8, 600]\nquantization = ["none", "int8"]\nspeculative-config = ["off", "suffix"]\n'
    )
    axes = read_space(path)
    assert axes["quantization"] == (None, "int8") and axes["speculative_config"] == (None, '{"method":"suffix"}')
    check_quality(axes, allowed_axes("int8"))
    with pytest.raises(ConfigError, match="--allow int8"):
        check_quality(axes, {})
    found = make_space(flat_config(), axes)
    assert len(found.candidates) == 4 and found.refused.total() == 4, "600 sequences in steps of 512 tokens"
    path.write_text("max-num-seqs = 8\n")
    with pytest.raises(ConfigError, match="a list of values"):
        read_space(path)
    assert varied(["enable-chunked-prefill=true,false"]) == {"enable_chunked_prefill": (True, False)}
    with pytest.raises(ConfigError, match="more than 20,000"):
        make_space(
            flat_config(), {"max_num_seqs": tuple(range(1, 300)), "max_num_batched_tokens": tuple(range(1, 300))}
        )
    with pytest.raises(ConfigError, match="take turns"):
        check_cores(flat_config(data_parallel_size=64))
