"""Threads by default, and what an engine costs while it has nothing to do."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.core.config import flat_config
from quire.core.machine import Cores, available_memory, cores
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.ops.cpu.thread_probe import ThreadRate, enough_threads, thread_counts, thread_rates
from quire.ops.native import load_native
from turns import reports


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("nonsense", None)]
)
def test_quota_is_read_from_the_control_group(text: str, quota: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cores(group=tmp_path).quota == quota


def test_old_control_groups_and_none_at_all(tmp_path: Path) -> None:
    assert cores(group=tmp_path).quota is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores(group=tmp_path).quota is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000")
    assert cores(group=tmp_path).quota == 3.0


@pytest.mark.parametrize(
    ("limit", "used", "stat", "prefix"),
    [
        ("memory.max", "memory.current", "memory.stat", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ],
)
def test_memory_is_what_the_control_group_leaves(limit: str, used: str, stat: str, prefix: str, tmp_path: Path) -> None:
    whole = available_memory(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("3000000\n")
    (tmp_path / used).write_text("2000000\n")
    assert available_memory(tmp_path) == 1_000_000
    (tmp_path / stat).write_text(f"{prefix}active_file 300000\n{prefix}inactive_file 200000\nrss 1500000\n")
    assert available_memory(tmp_path) == 1_500_000, "cached files make room"
    (tmp_path / used).write_text("4000000\n")
    assert available_memory(tmp_path) == 0
    for unlimited in ("max", "9223372036854771712"):
        (tmp_path / limit).write_text(unlimited)
        assert available_memory(tmp_path) > whole // 2


def test_siblings_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.machine.cpu_set", lambda: {0, 1, 2, 5})
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (5, "1,5")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert cores(cpus=tmp_path, group=tmp_path) == Cores(logical=4, physical=3, quota=None)


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (0.5, 1), (1.9, 2), (2.5, 2), (64.0, 8)])
def test_threads_stay_within_cores_and_quota(quota: float | None, threads: int) -> None:
    assert Cores(16, 8, quota).threads == threads


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts_that_are_measured(most: int, counts: list[int]) -> None:
    assert thread_counts(most) == counts


def test_enough_threads_are_the_fewest_that_read_as_fast() -> None:
    rates = [ThreadRate(1, 20.0, 100.0), ThreadRate(2, 39.5, 200.0), ThreadRate(4, 40.0, 400.0)]
    assert enough_threads(rates) == 2


@pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
def test_rates_of_threads_are_measured_and_the_count_is_put_back() -> None:
    native = load_native()
    assert native is not None
    rates = thread_rates("auto", 2, read_bytes=4 << 20, seconds=0.0)
    assert [r.threads for r in rates] == [1, 2] and native.threads() == 2
    assert all(r.read > 0.1 and r.linear > 0.1 for r in rates)


@pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
def test_an_idle_engine_takes_no_processor_time() -> None:
    """The pool's threads spin for microseconds after a step and then sleep."""
    engine = LocalEngine(flat_config(max_model_len=64, threads=4))
    engine.submit(Request(id="a", prompt=(5, 6, 7), params=SamplingParams(max_tokens=4), seed=0, arrival=0.0))
    for _ in reports(engine):
        pass
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


HEAPS = """
import ctypes, threading
from quire.core.machine import share_heaps
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(8)
def work():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has heaps of its own")
def test_threads_share_two_heaps() -> None:
    def heaps(call: str) -> int:
        done = subprocess.run([sys.executable, "-c", HEAPS.format(call=call)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.count("<heap nr=")

    assert heaps("share_heaps()") <= 2 < heaps("")
