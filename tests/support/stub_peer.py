"""A measured process without a model: `python stub_peer.py FOREIGN LOG NAME HOW`, by the protocol of the suite.

Each load is a line of LOG. HOW: good, refuses, dies (in the second load), hangs (in the second), errs (in the second).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

foreign, log, name, how = sys.argv[1:5]
sys.path.insert(0, foreign)
from protocol import Item, run_load, serve  # noqa: E402


class Engine:
    """A token of each request a step, of a millisecond."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.loads = 0

    def facts(self) -> dict[str, Any]:
        return {"version": "1.2", "weight_bytes": 100, "kv_bytes": 50, "kv_bytes_per_token": 2}

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        self.left[number] = output

    def step(self) -> list[tuple[int, int, bool]]:
        time.sleep(0.001)
        self.left = {number: left - 1 for number, left in self.left.items()}
        came = [(number, 1, not left) for number, left in self.left.items()]
        self.left = {number: left for number, left in self.left.items() if left}
        return came

    def load(self, items: list[list[Any]], most: int, twice: bool = False) -> dict[str, Any]:
        self.loads += 1
        with Path(log).open("a") as out:
            out.write(f"{name}\n")
        if self.loads == 2:
            if how == "dies":
                print("out of memory, say", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(60)
            if how == "errs":
                raise MemoryError("no room")
        return run_load(self, [Item(*item) for item in items], most) | {"extra": {"kv_waste": 0.25}}

    def weights_read(self) -> dict[str, float]:
        return {"bytes": 80.0}

    def perplexity(self, size: int, texts: dict[str, str]) -> dict[str, float]:
        return {"perplexity": 3.5}


if how == "refuses":
    print(json.dumps({"error": "--this is refused"}), flush=True)
else:
    serve(Engine())
