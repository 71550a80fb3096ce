"""What the processes that compress have in common: the job on the command line, and what is measured of it.

Runs in each tool's environment: nothing of quire is imported. The job is JSON: `source` (a folder), `rows` (a JSON file
of calibration token ids), `out` (a folder that is not there yet), `method`, and `recipe` for quire. What was measured
is the last line of stdout, JSON: `seconds` from the imports' end to the written folder, `cpu` those that processors
worked for it, `peak` bytes of the process at most, of which `imports` are there before the work.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """What is asked for."""

    source: str
    rows: list[list[int]]
    out: str
    recipe: Any


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. Linux only."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def run(methods: Mapping[str, Callable[[Job], None]]) -> None:
    """Do the job with the method that it names, and say what that took."""
    asked = json.loads(sys.argv[1])
    job = Job(asked["source"], json.loads(Path(asked["rows"]).read_text()), asked["out"], asked.get("recipe"))
    method, imports = methods[asked["method"]], memory("VmRSS")
    began, worked = time.perf_counter(), time.process_time()
    method(job)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    print(json.dumps({"seconds": seconds, "cpu": cpu, "imports": imports, "peak": memory("VmHWM")}), flush=True)
