"""`quire doctor`: which backend would run on this machine, and why not another."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import click

from quire.cli.params import command, option
from quire.cli.show import Rows, show, size
from quire.core.config import DEVICES, DeviceConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory, cores
from quire.core.version import VERSION

if TYPE_CHECKING:
    from quire.ops.backend import Ops


@command(
    "doctor",
    option("--device", default="auto", help=f"Backend to ask for: {', '.join(DEVICES)}."),
    option("--isa", default="auto", help="Instruction set to ask for."),
)
def doctor(device: str, isa: str) -> None:
    """What runs on this machine and why not something else. Exits with 1 when only the slow reference would run."""
    from quire.ops.lazy import has_torch

    show(
        "versions",
        [
            ("quire", VERSION),
            ("python", f"{platform.python_version()} ({sys.executable})"),
            (
                "torch",
                version("torch") if has_torch() else "not installed: a CPU does without (pip install 'quire[train]')",
            ),
        ],
    )
    show("machine", [("processor", f"{platform.machine()}, {cores()}"), ("memory", f"{size(available_memory())} free")])
    show("native kernels", _unit_rows())
    show("GPU", _gpu_rows())
    ops = _select(DeviceConfig(device=device, isa=isa))
    show("would run", [("backend", ops.name), ("kernels for", ops.isa), ("threads", f"{ops.threads}, of {cores()}")])
    if ops.timed:
        show("threads", _thread_rows(ops))
    if ops.name == "reference" and device == "auto":
        print("quire: only the slow torch reference would run; install g++ 12 or newer and install quire again")
        raise click.exceptions.Exit(1)


def _select(device: DeviceConfig) -> Ops:
    import logging
    import warnings

    from quire.ops.backend import open_backend

    # Doctor says the same in its own words.
    choice = logging.getLogger("quire.ops.choice")
    before = choice.level
    choice.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return open_backend(device)
    finally:
        choice.setLevel(before)


def _unit_rows() -> Rows:
    """Every instruction-set unit of the extension, and why one cannot run."""
    from quire.ops.native import UNITS, Native, load_native

    if load_native() is None:
        return [("quire._native", "was not built: installed without a C++20 compiler (QUIRE_NATIVE=OFF)")]
    rows: Rows = []
    for unit in UNITS:
        try:
            rows.append((unit, f"runs, {len(Native(unit).ids)} ops"))
        except ConfigError as error:
            rows.append((unit, error.message))
    return rows


def _thread_rows(ops: Ops) -> Rows:
    """What 1 .. n threads do here, and why so many are taken."""
    from quire.ops.cpu.thread_probe import enough_threads, thread_rates

    rates = thread_rates(ops.isa, ops.threads)
    rows = [
        (f"{r.threads} threads" if r.threads > 1 else "1 thread", f"{r.read:.1f} GB/s read, {r.linear:.0f} int8 GOP/s")
        for r in rates
    ]
    enough = enough_threads(rates)
    why = "one per core, within the quota: prompts and batches are bound by arithmetic, which grows with each core"
    if enough < ops.threads:
        why += f"; decoding one sequence is bound by memory, which {enough} already read as fast (--threads {enough})"
    return [*rows, (f"{ops.threads} taken", why)]


def _gpu_rows() -> Rows:
    """The GPU that `--device cuda` would take, or why there is none."""
    from quire.ops.lazy import has_torch

    if not has_torch():
        return [("cuda", "cannot run: PyTorch is not installed: pip install 'quire[gpu]'")]
    from quire.ops.triton.gpu import gpu_facts, why_no_gpu

    reason = why_no_gpu()
    if reason:
        return [("cuda", f"cannot run: {reason}")]
    facts = gpu_facts()
    return [
        ("device", f"{facts.name}, {facts.architecture}, {facts.processors} multiprocessors"),
        ("memory", f"{size(facts.free)} free of {size(facts.total)}"),
        ("triton", facts.triton),
        ("tuned sizes", facts.tuned),
    ]
