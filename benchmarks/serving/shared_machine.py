"""A server on a machine that it shares: quiet, and while another process keeps one core busy.

    python -m benchmarks.serving.shared_machine                      llama-1b, int4 group 32
    python -m benchmarks.serving.shared_machine --shape tiny --seconds 2

For each state: time per token of one stream and of eight together, time to the first token, and what a request that
needs no model (/v1/models) takes while they are answered: that of the event loop beside busy kernels. First of all and
last, the processor time that the server takes while nobody asks anything: its threads spin for microseconds after a
step and then sleep, so it must be close to none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS
from benchmarks.common.servers import Server, server
from quire.bench import serving
from quire.bench.http import Client
from quire.bench.loads import ServeLoad
from quire.bench.suite.foreign.shapes import SHAPES, write_config

STREAMS = (1, 8)
PROBE_GAP = 0.02


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that never sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def idle_share(found: Server, seconds: float) -> float:
    """Cores that the server keeps busy while nobody asks anything."""
    time.sleep(1.0)
    before = found.cpu_seconds()
    time.sleep(seconds)
    return (found.cpu_seconds() - before) / seconds


async def streams(args: argparse.Namespace, url: str, count: int) -> tuple[dict[str, Any], list[float]]:
    """`count` requests at once: what `quire bench serve` reports, and seconds of light requests beside them."""
    load = ServeLoad(
        base_url=url,
        num_prompts=count,
        input_len=str(args.input_len),
        output_len=str(args.output_len),
        vocab_size=SHAPES[args.shape]["vocab_size"],
    )
    client, light = Client(url), list[float]()

    async def probe() -> None:
        while True:
            started = time.perf_counter()
            await client.get("/v1/models")
            light.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_GAP)

    probing = asyncio.create_task(probe())
    try:
        found = await serving.run(load)
    finally:
        probing.cancel()
    return found, light


def figures(args: argparse.Namespace, url: str) -> dict[str, float]:
    """One state of the machine. `SystemExit` when a request failed."""
    row: dict[str, float] = {}
    for count in STREAMS:
        found, light = asyncio.run(streams(args, url, count))
        if found["rates"]["failed"]:
            raise SystemExit(f"requests failed: {found['errors']}")
        row[f"x{count} tokens/s"] = found["rates"]["output_tokens_per_s"]
        row[f"x{count} tpot p50 ms"] = found["latency_ms"]["tpot"]["p50"]
        row[f"x{count} ttft p50 ms"] = found["latency_ms"]["ttft"]["p50"]
        row[f"x{count} light p50 ms"] = 1e3 * statistics.median(light)
        row[f"x{count} light p99 ms"] = 1e3 * sorted(light)[int(0.99 * (len(light) - 1))]
    return row


def main() -> None:
    """Measure quiet and shared in turn, print medians, write JSON."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the idle server is watched")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "shared.json")
    args = parser.parse_args()
    folder = write_config(args.shape, args.work.absolute() / args.shape)
    words = [
        sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--max-model-len", "1024",
        "--threads", str(args.threads), "--quantization", args.quantization,
    ]  # fmt: skip
    rounds: dict[str, list[dict[str, float]]] = {"quiet": [], "shared": []}
    with server(words, {}, args.work / "quire-server.log") as found:
        idle = [idle_share(found, args.seconds)]
        for _ in range(args.rounds):
            rounds["quiet"].append(figures(args, found.url))
            with busy_core():
                rounds["shared"].append(figures(args, found.url))
        idle.append(idle_share(found, args.seconds))
    medians = {
        state: {name: statistics.median(r[name] for r in rows) for name in rows[0]} for state, rows in rounds.items()
    }
    print(f"idle server: {max(idle):.3f} cores busy")
    for name, quiet in medians["quiet"].items():
        print(f"{name:20s} quiet {quiet:8.2f}   one core busy {medians['shared'][name]:8.2f}")
    asked = {k: v for k, v in vars(args).items() if k not in ("work", "output")}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"load": asked, "idle_cores": idle, "medians": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
