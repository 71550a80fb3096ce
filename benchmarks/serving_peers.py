"""`quire serve` beside llama.cpp's server under the same load: a shared prefix and Poisson arrivals, over HTTP.

    python benchmarks/serving_peers.py                        llama-1b, int4 group 32 beside Q4_0
    python benchmarks/serving_peers.py --rate 2 --rounds 1

Both servers are loaded and idle; the load is put on one at a time. The client is that of `quire bench serve`: the
same prompts (token ids), lengths and arrival times for both, streamed, temperature 0, ends of text ignored. Both keep
prefixes. llama-server runs with a slot per request that --slots allows at once and one KV buffer for all of them
(--kv-unified), so that a slot may be as long as it needs to be; quire with its defaults and as many sequences.
llama-server finds a prefix again in the slot that computed it, so each slot computes it once; quire computes it once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environments import LLAMA_CPP_PYTHON, environment
from peers import HERE, Job, llama_cpp
from shapes import SHAPES, write_config

from quire.bench import serving
from quire.bench.loads import ServeLoad

FORMATS = {
    "q4_0": ["--quantization", "int4", "--group-size", "32"],
    "q8_0": ["--quantization", "int8", "--group-size", "32"],
    "bf16": [],
}
PREFIX = 512
START_SECONDS = 300


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(words: list[str], variables: dict[str, str], log: Path) -> Iterator[str]:
    """The address of a server that is up; it is stopped at the end. `SystemExit` shows the log of one that died."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, "--host", "127.0.0.1", "--port", str(port)], env=os.environ | variables, stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(START_SECONDS * 2):
            if process.poll() is not None:
                raise SystemExit(f"{words[0]} ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        else:
            raise SystemExit(f"{words[0]} did not answer within {START_SECONDS} s:\n{log.read_text()[-2000:]}")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def quire_words(args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of `quire serve`."""
    return [
        sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--max-model-len", "2048",
        "--max-num-seqs", str(args.slots), "--threads", str(args.threads), *FORMATS[args.format],
    ]  # fmt: skip


def llama_words(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command line of llama-server and its environment."""
    command = llama_cpp(Job(args.work, args.shape, args.format, args.threads))
    binary = environment(args.work, "llama").folder / "build" / "bin" / "llama-server"
    longest = PREFIX + args.input_len + args.output_len
    return [
        str(binary), "--model", command.words[2], "--parallel", str(args.slots), "--kv-unified",
        "--ctx-size", str(args.slots * (longest + 64)), "--threads", str(args.threads), "--no-webui",
    ], command.variables  # fmt: skip


def load(args: argparse.Namespace, url: str, rate: float) -> dict[str, Any]:
    """Put the load on one server: what `quire bench serve` reports."""
    asked = ServeLoad(
        base_url=url,
        num_prompts=args.requests,
        input_len=str(args.input_len),
        output_len=str(args.output_len),
        shared_prefix=PREFIX,
        vocab_size=SHAPES[args.shape]["vocab_size"],
        request_rate=rate,
        warmup=2,
        seed=1,
    )
    found = asyncio.run(serving.run(asked))
    if found["rates"]["failed"]:
        raise SystemExit(f"{found['rates']['failed']} requests to {url} failed: {found['errors']}")
    return found


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
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s; beyond what either can serve")
    parser.add_argument("--slots", type=int, default=16, help="requests computed at the same time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving.json")
    args = parser.parse_args()
    args.work = args.work.absolute()
    folder = write_config(args.shape, args.work / args.shape)
    words, variables = llama_words(args)
    rounds: list[dict[str, dict[str, float]]] = []
    with (
        server(quire_words(args, folder), {}, args.work / "quire-server.log") as ours,
        server(words, variables, args.work / "llama-server.log") as theirs,
    ):
        for number in range(args.rounds):
            rounds.append(
                {"quire": figures(load(args, ours, args.rate)), "llama.cpp": figures(load(args, theirs, args.rate))}
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
