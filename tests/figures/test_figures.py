"""Rows of figures: files that read back equal, runs that go on, and statistics that say what they can."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import ConfigError
from quire.figures.files import Appending, read_rows, write_rows
from quire.figures.machine import this_engine, this_machine
from quire.figures.metric_definitions import METRICS
from quire.figures.schema import FigureRow, Interval, RowEngine, RowLoad, RowMachine, RowModel, fields
from quire.figures.statistics import compare, interval


def row(**changes: object) -> FigureRow:
    made = FigureRow(
        kind="measured",
        benchmark="latency",
        time="2026-01-01T00:00:00Z",
        command="quire bench latency",
        machine=RowMachine(name="a machine", limits={"read_bytes_per_s": 1e10}),
        engine=RowEngine(name="quire", versions={"torch": "2.13"}),
        model=RowModel(name="llama-1b", parameters=10**9, format="int8"),
        load=RowLoad(batch=4, input_len=128.0),
        options={"quantization": "int8", "block_size": 16, "enforce_eager": True, "share": 0.5},
        metrics={"ttft_ms_p50": 12.5, "output_tokens_per_s": 40.0},
        intervals={"ttft_ms_p50": Interval(12.0, 13.0)},
        samples={"ttft_ms_p50": [12.0, 12.5, 13.0]},
        notes=["made by hand"],
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_read_back_equal(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    rows = [row(), row(technique="prefix cache", on=False, metrics={"kl": 0.0}, intervals={}, samples={}, notes=[])]
    write_rows(tmp_path / f"rows.{ending}", rows)
    assert read_rows(tmp_path / f"rows.{ending}") == rows


def test_a_run_that_was_killed_amid_a_row_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Appending(path).add(row())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    going_on = Appending(path)
    assert going_on.have == {row().key}
    other = row(load=RowLoad(batch=8))
    going_on.add(other)
    assert read_rows(path) == [row(), other]


def test_a_row_is_its_configuration_and_not_what_was_found() -> None:
    assert row().key == row(time="2027", metrics={}, machine=RowMachine(name="a machine", limits={})).key
    for changed in ({"load": RowLoad(batch=5)}, {"options": {}}, {"technique": "x"}, {"machine": RowMachine(name="b")}):
        assert row(**changed).key != row().key


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]\n", "line 1 is no row"),
        ("{\n", "line 1 is not JSON"),
        ('{"schema": 2}\n', "has schema 2, this quire knows 1"),
        ('{"kind": "guessed"}\n', "line 1 is no row"),
    ],
)
def test_files_that_hold_no_rows_are_refused_in_a_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_rows(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_every_field_and_every_metric_says_what_it_is() -> None:
    assert len(fields()) > 30 and all(meaning for _, _, meaning in fields())
    assert all(metric.definition for metric in METRICS.values()) and set(row().metrics) <= set(METRICS)


def test_this_machine_and_this_quire_say_who_they_are() -> None:
    assert this_machine().cores >= 1 and this_machine().memory_bytes > 1 << 30
    assert this_engine().versions["torch"]


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    rng = random.Random(1)
    for rounds in (6, 15, 40):
        held = 0
        for _ in range(1000):
            found = interval([rng.lognormvariate(0, 1) for _ in range(rounds)])
            held += found.low <= 1 <= found.high
        assert held >= 930


def test_a_difference_needs_rounds_and_more_than_noise() -> None:
    rng = random.Random(2)
    slow = [10 + rng.random() for _ in range(8)]
    fast = [9 + rng.random() / 2 for _ in range(8)]
    assert compare(fast, slow).significant and 0.8 < compare(fast, slow).ratio < 1
    assert not compare(slow, [value + 0.1 * (-1) ** i for i, value in enumerate(slow)]).significant
    assert not compare(fast[:3], slow[:3]).significant
    assert compare(fast, slow[:7]).significant
