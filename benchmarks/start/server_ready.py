"""The start of a server until it answers, and the memory it takes then: `quire serve`, and llama-server beside it.

    python -m benchmarks.start.server_ready MODEL.gguf
    python -m benchmarks.start.server_ready MODEL.gguf --llama-server build/bin/llama-server --rounds 5

The clock runs from before the process is made until GET /health answers. "cold": the pages of the model are dropped
before (by posix_fadvise; libraries stay). Starts take turns; medians count. One start of each before them is not
counted: it compiles Python's modules, as installs do. Memory is the proportional set of all processes once they
answered one request of one token, so that what they share counts once. Processor time is theirs until they were ready,
user and system: where others work beside, it says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.servers import server
from quire.core.machine import processor

CONTEXT = 2048


def drop_pages(path: Path) -> None:
    """The file is read from the disk again when it is next opened."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Each server's own words; both have a context of as many tokens."""
    made = {"quire": [str(args.quire), "serve", str(args.model), "--max-model-len", str(CONTEXT)]}
    if args.llama_server is not None:
        made["llama-server"] = [str(args.llama_server), "-m", str(args.model), "-c", str(CONTEXT), "-np", "1"]
    return made


class Start(NamedTuple):
    """Seconds until it was ready, of processors until then, and bytes of its processes after a request."""

    ready: float
    processor: float
    held: dict[str, int]


def start(words: list[str], folder: Path) -> Start:
    """Start it, and end it."""
    with server(words, {"PYTHONDONTWRITEBYTECODE": ""}, folder / "log") as one:
        used = one.cpu_seconds()
        with urllib.request.urlopen(f"{one.url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": "The", "max_tokens": 1}).encode()
        asked = urllib.request.Request(f"{one.url}/v1/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(asked).read()
        return Start(one.ready_seconds, used, one.memory())


def main() -> None:
    """Print a row for each server and temperature of the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quire", type=Path, default=Path(".venv/bin/quire"))
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[tuple[str, str], list[Start]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for words in commands(args).values():
            start(words, Path(folder))
        for _ in range(args.rounds):
            for pages in ("warm", "cold"):
                for name, words in commands(args).items():
                    if pages == "cold":
                        drop_pages(args.model)
                    found.setdefault((name, pages), []).append(start(words, Path(folder)))
    print(f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {args.model.name}")
    for (name, pages), runs in found.items():
        seconds = sorted(run.ready for run in runs)
        used = statistics.median(run.processor for run in runs)
        held = statistics.median(sum(run.held.values()) for run in runs)
        each = ", ".join(f"{who.split()[0]} {nbytes / 1e6:.0f}" for who, nbytes in runs[-1].held.items())
        spread = f"{seconds[0]:.2f} to {seconds[-1]:.2f}, processors {used:.2f}"
        print(f"{name:13} {pages}: {statistics.median(seconds):.2f} s ({spread}), {held / 1e6:.0f} MB ({each})")


if __name__ == "__main__":
    main()
