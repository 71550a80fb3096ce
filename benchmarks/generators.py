"""quire's load generator: how many requests it sends from one core, and its figures beside those of other tools.

    python benchmarks/generators.py rate     requests/s from one core against a stub on another; how late sends were
    python benchmarks/generators.py peers    quire, vLLM and GuideLLM put the same load on one server, in turn
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import measure, parser_of

from quire.bench import serving
from quire.bench.loads import ServeLoad
from quire.bench.sending import on_loop

HERE = Path(__file__).parent


@contextmanager
def stub(core: int) -> Iterator[str]:
    """The stub server in a process on `core`: its URL."""
    command = [sys.executable, str(HERE / "stub_stream.py"), str(core)]
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
            got = on_loop(serving.measure(_at(load, url)))
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


def _at(load: ServeLoad, url: str) -> ServeLoad:
    import msgspec

    return msgspec.structs.replace(load, base_url=url)


WORK = {"rate": rate}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--rates", type=float, nargs="+", default=[500.0, 1000.0, 2000.0, 3000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--arrivals", default="poisson")
    measure(WORK, parser.parse_args(), "generators")


if __name__ == "__main__":
    main()
