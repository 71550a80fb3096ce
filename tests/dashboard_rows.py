"""Rows for the dashboard's pictures, measured on the embedded model here: `python tests/dashboard_rows.py FOLDER`.

Formats take turns, round by round. Limits of the machine are those that numpy reaches, which is less than it can do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.bench import offline, quality
from quire.bench.loads import LatencyLoad, ThroughputLoad
from quire.core.config import flat_config
from quire.engine.llm import LLM
from quire.engine.local import LocalEngine
from quire.figures.files import write_rows
from quire.figures.machine import now, this_engine, this_machine
from quire.figures.schema import FigureRow, RowLoad, RowMachine, RowModel
from quire.figures.statistics import interval, median

FORMATS = {"bfloat16": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
BATCHES = (1, 2, 4, 8, 16)
ROUNDS = 7
PARAMETERS = 6_000_000
Found = dict[str, float]


def limits() -> dict[str, float]:
    """Bytes read per second by a sum of floats over 256 MiB, and operations per second of a product of matrices."""
    data, square = np.ones(1 << 26, np.float32), np.ones((1024, 1024), np.float32)
    return {
        "read_bytes_per_s": data.nbytes / best(lambda: data.sum()),
        "bf16_flops_per_s": 2 * 1024**3 / best(lambda: square @ square),
    }


def best(call: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def flat(results: dict[str, dict[str, Found]], batch: int) -> Found:
    """Metrics by the names of METRICS."""
    rates = results["rates"]
    found = {name: rates[name] for name in ("output_tokens_per_s", "total_tokens_per_s", "duration_s")}
    for name, parts in results["latency_ms"].items():
        found |= {f"{name}_ms_{part}": parts[part] for part in ("mean", "p50", "p90", "p95", "p99")}
    return found | {"decode_tokens_per_s": 1000 * batch / found["tpot_ms_p50"]}


def summed(rounds: list[Found], extra: Found) -> dict[str, object]:
    """Medians of rounds, their intervals, and the rounds."""
    samples = {name: [each[name] for each in rounds] for name in rounds[0]}
    medians = {name: median(values) for name, values in samples.items()}
    return {
        "metrics": medians | extra,
        "intervals": {n: interval(v) for n, v in samples.items()},
        "samples": samples,
    }


def latencies(machine: RowMachine) -> list[FigureRow]:
    """The three formats at several batches, the speed of int8 and int4 as techniques beside bfloat16."""
    engines = {name: LocalEngine(flat_config(device="cpu", **more)) for name, more in FORMATS.items()}
    rows = []
    for batch in BATCHES:
        load = LatencyLoad(batch_size=batch, input_len="128", output_len="64", warmup=0, iters=1)
        found: dict[str, list[Found]] = {name: [] for name in engines}
        for turn in range(-1, ROUNDS):
            for name, engine in engines.items():
                results = flat(offline.latency(engine, load, 100 + turn), batch)
                if turn >= 0:
                    found[name].append(results)
        for name, engine in engines.items():
            facts = {"weight_bytes": float(engine.info.weight_bytes)}
            quantization = f" --quantization {name}" if FORMATS[name] else ""
            rows.append(
                FigureRow(
                    kind="measured",
                    benchmark="latency",
                    suite="pictures",
                    time=now(),
                    machine=machine,
                    engine=this_engine(),
                    command=f"quire bench latency{quantization} --batch-size {batch} --input-len 128 --output-len 64",
                    model=RowModel(name="pydoc", parameters=PARAMETERS, format=name, kv_format="bfloat16"),
                    load=RowLoad(requests=batch, batch=batch, input_len=128, output_len=64, arrivals="closed"),
                    **summed(found[name], facts),
                )
            )
    for engine in engines.values():
        engine.close()
    return rows


def prefixes(machine: RowMachine) -> list[FigureRow]:
    """Many requests with one beginning, with the prefix cache and without it."""
    rows = []
    engines = {on: LocalEngine(flat_config(device="cpu", enable_prefix_caching=on)) for on in (True, False)}
    load = ThroughputLoad(num_prompts=24, input_len="16", output_len="16", shared_prefix=160)
    found: dict[bool, list[Found]] = {True: [], False: []}
    for turn in range(-1, ROUNDS):
        for on, engine in engines.items():
            results = flat(offline.throughput(engine, load, 100 + turn), 24)
            if turn >= 0:
                found[on].append(results)
    for on, engine in engines.items():
        rows.append(
            FigureRow(
                kind="measured",
                benchmark="throughput",
                suite="pictures",
                time=now(),
                machine=machine,
                engine=this_engine(),
                technique="prefix cache",
                on=on,
                options={"enable_prefix_caching": on},
                command=f"quire bench throughput --{'' if on else 'no-'}enable-prefix-caching --num-prompts 24 "
                "--input-len 16 --output-len 16 --shared-prefix 160",
                model=RowModel(name="pydoc", parameters=PARAMETERS, format="bfloat16", kv_format="bfloat16"),
                load=RowLoad(requests=24, batch=0, input_len=176, output_len=16, shared_prefix=160),
                claim="one copy of a common prefix",
                **summed(found[on], {}),
            )
        )
        engine.close()
    return rows


def qualities(machine: RowMachine) -> list[FigureRow]:
    """Perplexity of each format on one held-out text."""
    rows = []
    for name, more in FORMATS.items():
        llm = LLM(**more)
        texts = dict(list(quality.heldout_texts(Path(llm.info.folder)).items())[:1])
        found = quality.perplexity(llm, texts)["perplexity"]
        rows.append(
            FigureRow(
                kind="measured",
                benchmark="quality",
                suite="pictures",
                time=now(),
                machine=machine,
                engine=this_engine(),
                command=f"quire eval{f' --quantization {name}' if more else ''} --limit 1",
                model=RowModel(name="pydoc", parameters=PARAMETERS, format=name, kv_format="bfloat16"),
                load=RowLoad(),
                metrics={"perplexity": found, "weight_bytes": float(llm.info.weight_bytes)},
            )
        )
        del llm
    return rows


def main(folder: Path) -> None:
    """All of them, twice: two runs to compare."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in ("first", "second"):
        machine = this_machine(limits())
        write_rows(folder / f"{run}.jsonl", [*latencies(machine), *prefixes(machine), *qualities(machine)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
