"""`quire doctor`: which backend would run on this machine and why not another, and what is slow here and why."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quire.cli.params import command, option
from quire.cli.show import Rows, show, size
from quire.core.config import DEVICES, DeviceConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory, cores
from quire.core.version import VERSION

if TYPE_CHECKING:
    from quire.cli.slow_machine import Slow
    from quire.ops.backend import Ops
    from quire.ops.cpu.thread_probe import ThreadRate


KNOWN_MODELS = (("SmolLM2-135M Q4_1", 84e6), ("a 1.5B model at 4 bits", 0.87e9), ("an 8B model at 4 bits", 4.6e9))
"""Models and the bytes of weights that a token of one sequence reads: all but the table of embeddings."""


@command(
    "doctor",
    option("--device", default="auto", help=f"Backend to ask for: {', '.join(DEVICES)}."),
    option("--isa", default="auto", help="Instruction set to ask for."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."),
)
def doctor(device: str, isa: str, as_json: bool) -> None:
    """What runs on this machine, why not something else, and what is slow here. Exits with 1 when only the slow
    reference would run."""
    found: dict[str, Any] = {}

    def tell(title: str, rows: Rows) -> None:
        found[title] = dict(rows)
        if not as_json:
            show(title, rows)

    tell("versions", _version_rows())
    memory = f"{size(available_memory())} free"
    tell("machine", [("processor", f"{platform.machine()}, {cores()}"), ("memory", memory)])
    tell("native kernels", _unit_rows())
    tell("GPU", _gpu_rows())
    ops = _select(DeviceConfig(device=device, isa=isa))
    tell("would run", [("backend", ops.name), ("kernels for", ops.isa), ("threads", f"{ops.threads}, of {cores()}")])
    rates = _rates(ops)
    if rates:
        tell("threads", _thread_rows(ops, rates))
        tell("can reach at most", _reach_rows(rates))
    slow = _slow(rates)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found | {"slow here": slow}), indent=2).decode())
    else:
        show("slow here", _slow_rows(slow))
    if ops.name == "reference" and device == "auto":
        told = "quire: only the slow torch reference would run; install g++ 12 or newer and install quire again"
        print(told, file=sys.stderr if as_json else sys.stdout)
        raise click.exceptions.Exit(1)


def _version_rows() -> Rows:
    from quire.ops.lazy import has_torch

    lacking = "not installed: a CPU does without (pip install 'quire[train]')"
    return [
        ("quire", VERSION),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", version("torch") if has_torch() else lacking),
    ]


def _rates(ops: Ops) -> list[ThreadRate]:
    """What 1 .. n threads do here; [] for backends that are not measured."""
    if not ops.timed:
        return []
    from quire.ops.cpu.thread_probe import thread_rates

    return thread_rates(ops.isa, ops.threads)


def _slow(rates: list[ThreadRate]) -> list[Slow]:
    """What makes this machine slow."""
    from quire.cli.slow_machine import System, slow_memory, slow_things
    from quire.ops.lazy import has_torch
    from quire.ops.native import load_native

    native = load_native()
    packages = {"torch": has_torch(), "triton": find_spec("triton") is not None}
    found = slow_things(System(), packages, () if native is None else native.units())
    memory = slow_memory(1e9 * max(r.read for r in rates), rates[-1].threads) if rates else None
    return found if memory is None else [memory, *found]


def _slow_rows(slow: list[Slow]) -> Rows:
    if not slow:
        return [("nothing", "no setting, quota, disk or neighbour was found that costs speed")]
    rows: Rows = []
    for each in slow:
        rows += [(each.check if each.level == "slow" else f"({each.check})", each.text), ("", f"-> {each.advice}")]
    return rows


def _reach_rows(rates: list[ThreadRate]) -> Rows:
    """Tokens per second of one sequence that memory allows: each token reads all weights once."""
    read = 1e9 * max(r.read for r in rates)
    return [
        (name, f"{read / count:,.0f} tokens/s of one sequence: it reads {count / 1e9:.2g} GB at {read / 1e9:.1f} GB/s")
        for name, count in KNOWN_MODELS
    ]


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


def _thread_rows(ops: Ops, rates: list[ThreadRate]) -> Rows:
    """What 1 .. n threads do here, and why so many are taken."""
    from quire.ops.cpu.thread_probe import enough_threads

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
