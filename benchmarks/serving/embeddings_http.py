"""Texts a second of an encoder over HTTP, beside `LLM.embed` in the same rounds.

    python -m benchmarks.serving.embeddings_http --minilm FOLDER [--rounds 3] [--seconds 3]

all-MiniLM-L6-v2 with int8 weights beside bfloat16. A case is texts in a request x tokens of each; so many clients send
one request after the other, over connections that stay open. They work on the same cores as the server. Each route's
rate is divided by that of `LLM.embed` with the texts of one request, in the same round; given is the median of the
rounds. Results: results/embeddings.json, by processor.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.results import keep, parser_of
from benchmarks.serving.embedding_models import made_model
from benchmarks.serving.embeddings import CASES, texts_of
from quire import LLM
from quire.bench.suite.servers import free_port
from quire.figures.machine import this_machine
from quire.ops.native import Native

READY_SECONDS = 60
BODIES: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "/v1/embeddings": lambda texts: {"model": "minilm", "input": texts, "encoding_format": "base64"},
    "/embed": lambda texts: {"inputs": texts},
}
CLIENTS = (1, 4, 16)
MOST_TOKENS = 4 * 64 * 512
"""Of all requests in flight, or a round takes minutes."""


def post(connection: http.client.HTTPConnection, route: str, body: bytes) -> None:
    """Send a request and read its answer whole; `RuntimeError` where it is none."""
    connection.request("POST", route, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{route}: {answer.status} {data[:200]!r}")


def served(port: int, route: str, texts: list[str], clients: int, seconds: float) -> float:
    """Texts a second of `clients` that each send their requests one after the other."""
    counts, body = [0] * clients, json.dumps(BODIES[route](texts)).encode()
    started = time.perf_counter()

    def send(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while time.perf_counter() - started < seconds:
            post(connection, route, body)
            counts[number] += len(texts)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def within(llm: LLM, texts: list[str], seconds: float) -> float:
    """Texts a second of `LLM.embed`."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        llm.embed(texts, use_tqdm=False)
        count += len(texts)
    return count / (time.perf_counter() - started)


def wait_until_ready(port: int) -> None:
    """Return once the server answers."""
    for _ in range(READY_SECONDS * 10):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server was not ready in time")


def main() -> None:
    """Measure every case by every route and number of clients."""
    parser = parser_of(__doc__)
    parser.add_argument("--minilm", type=Path, required=True, help="folder of the real model")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("build/peers"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model, port = made_model("minilm", args.minilm, args.work.absolute()), free_port()
    options = {"quantization": "int8", "dtype": "bfloat16", "threads": args.threads}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = [sys.executable, "-m", "quire", "serve", str(model.folder), "--served-model-name", "minilm", *flags]
    server = subprocess.Popen([*words, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port)
        found = compared(LLM(str(model.folder), device="cpu", **options), port, model, args)
    finally:
        server.terminate()
        server.wait()
    keep("embeddings", {f"minilm over HTTP, {this_machine().name} ({Native().isa})": found})


def compared(llm: LLM, port: int, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Case -> texts a second of `LLM.embed`, and the shares of it that each route and number of clients reach."""
    found: dict[str, Any] = {}
    ways = [(route, clients) for route in BODIES for clients in CLIENTS]
    for case in args.case:
        count, tokens = CASES[case]
        texts = texts_of(model, count, tokens, 1)
        within(llm, texts, 1.0)
        served(port, "/embed", texts, 1, 1.0)
        rates: list[float] = []
        shares: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            rates.append(within(llm, texts, args.seconds))
            for way in ways:
                if way[1] * count * tokens > MOST_TOKENS:
                    continue
                shares[way].append(served(port, way[0], texts, way[1], args.seconds) / rates[-1])
        found[case] = {"LLM.embed": round(statistics.median(rates), 1)} | {
            f"{route}, {clients} clients": round(statistics.median(each), 3)
            for (route, clients), each in shares.items()
            if each
        }
        print(case, json.dumps(found[case], indent=1), flush=True)
    return found


if __name__ == "__main__":
    main()
