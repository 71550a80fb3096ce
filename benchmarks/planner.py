"""The planner beside the engine: memory, step times of 24 configurations that no calibration saw, the critical batch.

    python planner.py memory                        planned and real bytes of processes, several shapes and formats
    python planner.py times [--shape llama-1b]      TTFT and TPOT, predicted and measured
    python planner.py critical                      where arithmetic takes as long as reading weights
    python planner.py calibrate                     measure this machine anew

Weights are random, in the shapes of `shapes.py`. Each configuration is measured in a process that holds one model; a
measurement is the median of rounds in which other processes left it alone. Calibration (`quire.plan.calibrate`) times
made-up matrices of other sizes; `times` calibrates anew before each format, as the memory of a shared host is not as
fast in one minute as in the next.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import measure, parser_of
from shapes import SHAPES, write_config

from quire.core.machine import end_with_parent

FORMATS = ("none", "int8", "int4")
TIMES = ((1, 128), (8, 128), (32, 128), (1, 512), (4, 512), (16, 512), (1, 2048), (1, 4096))
"""(batch, tokens of a prompt): 8 for each of three formats."""
ANSWER = 16
ROUNDS, TRIES, PATIENCE = 2, 40, 4.0
"""Rounds of a load in which the machine was quiet, of so many that are tried at most, for so many seconds."""
QUIET = 0.04
"""Share of the processors that others may have in a round; the quietest round counts where none is."""
MEMORY = (
    ("qwen-0.6b", {"quantization": "none"}),
    ("qwen-0.6b", {"quantization": "int8"}),
    ("qwen-0.6b", {"quantization": "int4", "kv_cache_dtype": "int8"}),
    ("llama-1b", {"quantization": "none"}),
    ("llama-1b", {"quantization": "int8", "group_size": 128}),
    ("llama-1b", {"quantization": "int4"}),
    ("llama-1b", {"quantization": "nf4", "max_num_batched_tokens": 1024}),
    ("llama-1b", {"quantization": "none", "bf16_bits": 12}),
)


def options_of(shape: str, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Of an engine with random weights."""
    return {"model": str(write_config(shape, folder / shape)), "load_format": "dummy", "cache_packed": "off"} | more


def resident() -> int:
    """Bytes of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def child(what: str, **given: Any) -> Any:
    """Run a part in a process of its own; the last line it prints is its result."""
    command = [sys.executable, __file__, f"--child={what}", json.dumps(given)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    return json.loads(done.stdout.splitlines()[-1])


def touched(engine: Any) -> list[Any]:
    """The tensors of the KV cache, all of whose pages the system has given.

    It gives them at their first touch, which makes a step slow once: of 512 tokens, 650 ms instead of 390.
    """
    caches = [tensor for cache in engine.engine.runner.caches.own for tensor in (cache.keys, cache.values)]
    for tensor in caches:
        tensor.zero_()
    return caches


def child_memory(options: dict[str, Any]) -> dict[str, Any]:
    """An engine whose KV cache is full and whose largest step was run: what it takes, by parts."""
    from quire.bench.drive import drive
    from quire.bench.workload import Length, random_items, requests_of
    from quire.core.config import flat_config
    from quire.engine.local import LocalEngine
    from quire.plan.predict import Machine, Planner

    planner = Planner(flat_config(**options), Machine())
    engine = LocalEngine(flat_config(**options, num_blocks=planner.kv.blocks))
    lengths = Length.parse("600", "input-len"), Length.parse("24", "output-len")
    items = random_items(12, *lengths, vocab_size=engine.info.vocab_size, seed=1)
    drive(engine, requests_of(items, engine.info, "memory"))
    caches = touched(engine)
    planned = planner.account
    return {
        "planned": {"weights": planned.weights, "kv": planned.kv, "rest": planned.total - planned.weights - planned.kv},
        "engine": {
            "weights": engine.info.weight_bytes,
            "kv": sum(tensor.nbytes for tensor in caches),
            "rest": resident() - engine.info.weight_bytes - sum(tensor.nbytes for tensor in caches),
        },
        "planned_total": planned.total,
        "resident": resident(),
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Planned and real bytes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for shape, more in MEMORY:
            options = options_of(shape, Path(folder), {"kv_cache_memory_bytes": 256 << 20} | more)
            one = child("memory", options=options)
            off = one["planned_total"] / one["resident"] - 1
            found.append({"shape": shape, **more, **one, "off": round(off, 4)})
            print(f"{shape} {more} planned {one['planned_total']:,} real {one['resident']:,}: {off:+.2%}", flush=True)
    return {"cases": found, "largest": max(abs(case["off"]) for case in found)}


def child_times(options: dict[str, Any], cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """TTFT and TPOT of batches, predicted and measured, in milliseconds."""
    from quire.bench.calibration import machine_of
    from quire.bench.drive import drive
    from quire.bench.workload import Length, random_items, requests_of
    from quire.core.config import flat_config
    from quire.engine.local import LocalEngine
    from quire.plan.planned_load import PlannedLoad
    from quire.plan.predict import Planner

    config = flat_config(**options)
    planner = Planner(config, machine_of(config, None, fresh=True))
    engine = LocalEngine(config)
    touched(engine)
    found = []
    for batch, length in cases:
        lengths = Length(length - ANSWER, length - ANSWER), Length(ANSWER, ANSWER)
        warm = random_items(batch, Length(8, 8), Length(3, 3), vocab_size=engine.info.vocab_size, seed=7)
        drive(engine, requests_of(warm, engine.info, f"warm-{batch}-{length}"))  # what that batch is recorded for
        rounds: list[tuple[float, float, float]] = []
        end = time.perf_counter() + PATIENCE
        for turn in range(TRIES):
            seed = (turn * 100 + batch) * 8192 + length  # no prompt begins as another does: nothing is found again
            items = random_items(batch, *lengths, vocab_size=engine.info.vocab_size, seed=seed)
            others = Others()
            records, _ = drive(engine, requests_of(items, engine.info, f"{batch}-{length}-{turn}"))
            firsts = [record.chunks[0] - record.sent for record in records]
            gaps = [(record.chunks[-1] - record.chunks[0]) / (ANSWER - 1) for record in records]
            rounds.append((others.share(), statistics.mean(firsts), statistics.mean(gaps)))
            if sum(share <= QUIET for share, *_ in rounds) == ROUNDS or time.perf_counter() > end:
                break
        said = planner.predict(PlannedLoad(batch=batch, input=length - ANSWER, output=ANSWER))
        rounds.sort()
        quiet = [one for one in rounds if one[0] <= QUIET] or rounds[:1]
        share, ttft, tpot = (statistics.median(one) for one in zip(*quiet, strict=True))
        found.append({
            "batch": batch, "input": length, "ttft_ms": round(1e3 * ttft, 2), "tpot_ms": round(1e3 * tpot, 3),
            "ttft_predicted_ms": round(said.ttft_ms, 2), "tpot_predicted_ms": round(said.tpot_ms, 3),
            "ttft_off": round(said.ttft_ms / ttft / 1e3 - 1, 4), "tpot_off": round(said.tpot_ms / tpot / 1e3 - 1, 4),
            "rounds": len(quiet), "others": round(share, 3),
        })  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


class Others:
    """What other processes had of this machine's processors since it was made, 0 to 1 (Linux)."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), self._all(), time.process_time()

    @staticmethod
    def _all() -> float:
        """Seconds that all processors were busy, stolen ones among them."""
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")

    def share(self) -> float:
        """Of all processors' time."""
        spent = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return max(0.0, self._all() - self._busy - (time.process_time() - self._own)) / spent


def engines(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Options of an engine of each format."""
    for form in args.formats or FORMATS:
        yield options_of(args.shape, folder, {"quantization": form, "num_blocks": 2400})


def times(args: argparse.Namespace) -> dict[str, Any]:
    """TTFT and TPOT of three formats x eight loads."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for options in engines(args, Path(folder)):
            cases = child("times", options=options, cases=TIMES)
            found += [{"format": options["quantization"], **case} for case in cases]
    misses = [(abs(case[f"{name}_off"]), name, case) for case in found for name in ("ttft", "tpot")]
    worst = max(misses, key=lambda miss: miss[0])
    return {
        "shape": args.shape, "cases": found, "within_10_percent": sum(miss[0] <= 0.1 for miss in misses),
        "of": len(misses), "median_off": round(statistics.median(miss[0] for miss in misses), 4),
        "largest": {"what": worst[1], "off": worst[0], "case": worst[2]},
    }  # fmt: skip


def child_critical(options: dict[str, Any]) -> dict[str, Any]:
    """A step of one row beside what a row costs in one of 256, predicted and measured."""
    from quire.bench.calibration import machine_of
    from quire.bench.workload import Length, random_items, requests_of
    from quire.core.config import flat_config
    from quire.engine.local import LocalEngine
    from quire.plan.predict import Planner
    from quire.plan.roofline import FULL, critical_batch

    config = flat_config(**options)
    planner, engine = Planner(config, machine_of(config, None)), LocalEngine(config)
    touched(engine)
    spent: dict[str, list[float]] = {"decode": [], "full": []}
    for turn in range(7):
        [item] = random_items(1, Length(FULL, FULL), Length(8, 8), vocab_size=engine.info.vocab_size, seed=turn)
        [request] = requests_of([item], engine.info, f"critical-{turn}")
        engine.submit(request)
        while engine.engine.has_work:
            rows = engine.engine.steps
            began = time.perf_counter()
            engine.poll(0.0)
            assert engine.engine.steps == rows + 1
            spent["full" if engine.engine.step_tokens == FULL else "decode"].append(time.perf_counter() - began)
    decode, full = (statistics.median(spent[name]) for name in ("decode", "full"))
    return {"predicted": round(critical_batch(planner.times), 1), "measured": round(decode / (full / FULL), 1)}


def critical(args: argparse.Namespace) -> dict[str, Any]:
    """Of each format."""
    with tempfile.TemporaryDirectory() as folder:
        return {o["quantization"]: child("critical", options=o) for o in engines(args, Path(folder))}


def child_calibrate(options: list[dict[str, Any]]) -> str:
    """Anew for the formats of `times`."""
    from quire.bench.calibration import machine_of
    from quire.core.config import flat_config

    machine = None
    for i, one in enumerate(options):
        machine = machine_of(flat_config(**one), None, fresh=i == 0)
    assert machine is not None and machine.calibration is not None
    import msgspec

    return str(msgspec.json.encode(machine.calibration).decode())


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """What this machine does."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = json.loads(child("calibrate", options=list(engines(args, Path(folder)))))
    return found


CHILDREN = {"memory": child_memory, "times": child_times, "critical": child_critical, "calibrate": child_calibrate}
PARTS = {"calibrate": calibrate, "memory": memory, "times": times, "critical": critical}


def main() -> None:
    """Measure the named parts, or be the process of one."""
    if len(sys.argv) == 3 and sys.argv[1].startswith("--child="):
        end_with_parent()
        made: Any = CHILDREN[sys.argv[1].removeprefix("--child=")]
        print(json.dumps(made(**json.loads(sys.argv[2]))))
        return
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--formats", choices=FORMATS, nargs="*")
    measure(PARTS, parser.parse_args(), "planner")


if __name__ == "__main__":
    main()
