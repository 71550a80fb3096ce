"""Two servers, `quire serve` and llama.cpp's, under the same load: a shared prefix and Poisson arrivals, over HTTP.

    python -m benchmarks.peers.http_servers                        llama-1b, int4 group 32 beside Q4_0
    python -m benchmarks.peers.http_servers --rate 2 --rounds 1

Both servers are loaded and idle; the load is put on one at a time. The client is that of `quire bench serve`: the
same prompts (token ids), lengths and arrival times for both, streamed, temperature 0, ends of text ignored. Both keep
prefixes. llama-server runs with a slot per request that --slots allows at once and one KV buffer for all of them
(--kv-unified), so that a slot may be as long as it needs to be; quire with its defaults and as many sequences.
llama-server finds a prefix again in the slot that computed it, so each slot computes it once; quire computes it once.

Before the first round llama-server gets as many requests at once as it has slots; requests then arrive --factor times
as fast as it finished those (or at --rate), so that neither waits for the load. On a small machine a round takes
minutes: after every eighth request a line says how far it is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS
from benchmarks.common.servers import server
from benchmarks.peers.engines import job
from quire.bench import serving
from quire.bench.loads import ServeLoad
from quire.bench.suite.engines import llama_cpp
from quire.bench.suite.environments import LLAMA_CPP_PYTHON, environment
from quire.bench.suite.foreign.shapes import SHAPES, write_config

FORMATS = {
    "q4_0": ["--quantization", "int4", "--group-size", "32"],
    "q8_0": ["--quantization", "int8", "--group-size", "32"],
    "bf16": [],
}
PREFIX = 512
LINE_EVERY = 8


def quire_words(args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of `quire serve`."""
    return [
        sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--max-model-len", "2048",
        "--max-num-seqs", str(args.slots), "--threads", str(args.threads), *FORMATS[args.format],
    ]  # fmt: skip


def llama_words(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command line of llama-server and its environment."""
    command = llama_cpp(job(args.work, args.shape, args.format, args.threads))
    binary = environment(args.work, "llama").folder / "build" / "bin" / "llama-server"
    longest = PREFIX + args.input_len + args.output_len
    return [
        str(binary), "--model", command.words[2], "--parallel", str(args.slots), "--kv-unified",
        "--ctx-size", str(args.slots * (longest + 64)), "--threads", str(args.threads), "--no-webui",
    ], command.variables  # fmt: skip


def load(args: argparse.Namespace, name: str, url: str, rate: float, requests: int) -> dict[str, Any]:
    """Put the load on one server: what `quire bench serve` reports. `SystemExit` when --limit is over."""
    asked = ServeLoad(
        base_url=url,
        num_prompts=requests,
        input_len=str(args.input_len),
        output_len=str(args.output_len),
        shared_prefix=PREFIX,
        vocab_size=SHAPES[args.shape]["vocab_size"],
        request_rate=rate,
        warmup=2,
        seed=1,
    )
    done, started = itertools.count(1), time.monotonic()

    def say() -> None:
        count = next(done)
        if count % LINE_EVERY == 0 or count == requests:
            print(f"  {name}: {count} of {requests} requests after {time.monotonic() - started:.0f} s", flush=True)

    try:
        found = asyncio.run(asyncio.wait_for(serving.run(asked, say), args.limit))
    except TimeoutError:
        raise SystemExit(f"{name} did not finish {requests} requests within --limit {args.limit:g} s") from None
    if found["rates"]["failed"]:
        raise SystemExit(f"{found['rates']['failed']} requests to {url} failed: {found['errors']}")
    return found


def arrivals(args: argparse.Namespace, theirs: str) -> float:
    """Requests per second: --rate, or --factor times what llama-server finishes when all its slots are taken."""
    if args.rate:
        return float(args.rate)
    alone = load(args, "llama.cpp, all at once", theirs, math.inf, args.slots)["rates"]
    rate = args.factor * float(alone["requests_per_minute"]) / 60
    print(f"llama.cpp: {alone['output_tokens_per_s']:.1f} tokens/s, so {rate:.2f} requests/s arrive", flush=True)
    return rate


def figures(found: dict[str, Any]) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "output_tokens_per_s": found["rates"]["output_tokens_per_s"],
        "ttft_p50_ms": found["latency_ms"]["ttft"]["p50"],
        "tpot_p50_ms": found["latency_ms"]["tpot"]["p50"],
        "e2e_p50_ms": found["latency_ms"]["e2e"]["p50"],
    }


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each figure and the median of the rounds' ratios quire / llama.cpp."""
    return {
        name: {
            "quire": statistics.median(r["quire"][name] for r in rounds),
            "llama.cpp": statistics.median(r["llama.cpp"][name] for r in rounds),
            "ratio": statistics.median(r["quire"][name] / r["llama.cpp"][name] for r in rounds),
        }
        for name in rounds[0]["quire"]
    }


def main() -> None:
    """Start both, measure in turn, print, write JSON."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--format", choices=FORMATS, default="q4_0", help="llama.cpp's; quire's has the same size")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64, help=f"own tokens after the {PREFIX} shared ones")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; 0 = by --factor")
    parser.add_argument("--factor", type=float, default=10.0, help="arrivals per request that llama.cpp can finish")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that one load may take")
    parser.add_argument("--slots", type=int, default=16, help="requests computed at the same time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.json")
    args = parser.parse_args()
    args.work = args.work.absolute()
    folder = write_config(args.shape, args.work / args.shape)
    words, variables = llama_words(args)
    rounds: list[dict[str, dict[str, float]]] = []
    with (
        server(quire_words(args, folder), {}, args.work / "quire-server.log") as ours,
        server(words, variables, args.work / "llama-server.log") as theirs,
    ):
        args.rate = arrivals(args, theirs.url)
        for number in range(args.rounds):
            rounds.append(
                {
                    name: figures(load(args, name, url, args.rate, args.requests))
                    for name, url in (("quire", ours.url), ("llama.cpp", theirs.url))
                }
            )
            print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    for name, row in summary(rounds).items():
        print(f"{name:20s} quire {row['quire']:9.1f}   llama.cpp {row['llama.cpp']:9.1f}   ratio {row['ratio']:6.2f}")
    asked = {k: v for k, v in vars(args).items() if k not in ("work", "output")}
    facts = {"prefix": PREFIX, "llama.cpp": f"llama-server of llama-cpp-python {LLAMA_CPP_PYTHON}"}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"load": asked | facts, "figures": summary(rounds), "rounds": rounds}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
