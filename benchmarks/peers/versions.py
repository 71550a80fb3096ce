"""Two builds of quire beside each other: the same shapes and options, interleaved, medians and ratios.

    python -m benchmarks.peers.versions OTHER_CHECKOUT --shape llama-1b --options '{"quantization": "int4"}'
    python -m benchmarks.peers.versions OTHER_CHECKOUT --shape smollm-135m --serve  # HTTP, embedded model too

OTHER_CHECKOUT is a checkout that was built (`make build`); its own environment and its own quire_process.py run. With
--serve both are loaded as servers, and the client of `quire bench serve` puts the same requests on one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common.servers import Server, server
from benchmarks.peers.engines import MEASURES, USUAL, Command, Process, measure, quire_process
from quire.bench import serving
from quire.bench.loads import ServeLoad
from quire.bench.suite.foreign.shapes import SHAPES, write_config

RATES = ("output_tokens_per_s", "requests_per_minute")
LATENCIES = ("ttft", "tpot", "e2e")


def other_python(checkout: Path) -> str:
    """The interpreter of the other checkout's own environment."""
    return str(checkout.absolute() / ".venv" / "bin" / "python")


def script_of(checkout: Path) -> Path:
    """Return the script that measures quire in a process; older checkouts have no folders of benchmarks."""
    folder = checkout.absolute() / "benchmarks"
    script = folder / "peers" / "quire_process.py"
    return script if script.exists() else folder / "peer_quire.py"


def in_process(args: argparse.Namespace, folder: Path, work: Path) -> None:
    """Print a line for every measure of every set of options, both engines without a server."""
    for options in args.options:
        own = {"threads": args.threads, **options}
        script = script_of(args.other)
        words = [other_python(args.other), str(script), str(folder), json.dumps(own)]
        new, old = quire_process(folder, own, work / "new"), Process("other", Command(words), work / "old")
        for what in args.measure:
            row = measure(new, old, what, args.rounds)
            rates = f"{row['quire_rate']:8.1f} / {row['peer_rate']:8.1f}"
            print(f"{args.shape} {json.dumps(options)} {what}: {rates}  ratio {row['ratio']:.3f}", flush=True)
        new.close()
        old.close()


def put(at: Server, requests: int, concurrency: int, vocabulary: int) -> dict[str, float]:
    """Figures of one load on a server, with the processor seconds its processes took."""
    asked = ServeLoad(
        base_url=at.url, num_prompts=requests, input_len="64", output_len="32", vocab_size=vocabulary,
        max_concurrency=concurrency, warmup=2, seed=1,
    )  # fmt: skip
    before = at.cpu_seconds()
    found = asyncio.run(serving.run(asked, lambda: None))
    if found["rates"]["failed"]:
        raise SystemExit(f"{found['rates']['failed']} requests to {at.url} failed: {found['errors']}")
    return (
        {name: float(found["rates"][name]) for name in RATES}
        | {f"{name}_p50_ms": float(found["latency_ms"][name]["p50"]) for name in LATENCIES}
        | {"cpu_seconds": at.cpu_seconds() - before}
    )


def over_http(args: argparse.Namespace, folder: Path, work: Path) -> None:
    """Print a line for every figure of a load over HTTP, of the shape (int4) and of the embedded model."""
    shaped = [str(folder), "--load-format", "dummy", "--quantization", "int4"]
    for name, model, vocabulary in ((args.shape, shaped, SHAPES[args.shape]["vocab_size"]), ("embedded", [], 256)):
        words = ["-m", "quire", "serve", *model, "--threads", str(args.threads), "--max-num-seqs", "16"]
        with (
            server([sys.executable, *words], {}, work / "new.log") as new,
            server([other_python(args.other), *words], {}, work / "old.log") as old,
        ):
            for concurrency in (1, 16):
                requests = args.requests if concurrency > 1 else args.requests // 4
                rounds = [
                    [put(at, requests, concurrency, vocabulary) for at in (new, old)] for _ in range(args.rounds + 1)
                ][1:]
                for figure in rounds[0][0]:
                    mine, theirs = ([pair[i][figure] for pair in rounds] for i in (0, 1))
                    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
                    both = f"{statistics.median(mine):9.2f} / {statistics.median(theirs):9.2f}"
                    print(f"{name} HTTP x{concurrency} {figure:20s} {both}  ratio {ratio:.3f}", flush=True)


def main() -> None:
    """Measure both in turn and print a line for every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--options", type=json.loads, nargs="+", default=[{"quantization": "int4"}], help="as JSON")
    parser.add_argument("--measure", choices=MEASURES, nargs="+", default=USUAL)
    parser.add_argument("--serve", action="store_true", help="over HTTP instead")
    parser.add_argument("--requests", type=int, default=128, help="requests of a round over HTTP")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / args.shape
        write_config(args.shape, folder)
        (over_http if args.serve else in_process)(args, folder, Path(work))


if __name__ == "__main__":
    main()
