"""The start of a process until its first token, beside llama.cpp: the first start of a model and later ones.

    python -m benchmarks.start.first_token                     llama-1b as a Q4_K_M file, and bf16 safetensors to int4
    python -m benchmarks.start.first_token --case q4_k_m --rounds 5

A first start finds nothing that an earlier one kept: neither packed weights nor tuning. A later one finds packed
weights where any are kept (a file's own blocks are packed anew, as fast as they would be read). Each is
a fresh process that imports, loads, continues one word and prints the first token; the clock runs from before it is
made until that line is here. llama.cpp reads the same Q4_K_M file; it cannot quantize while it loads, so beside bf16 to
int4 it loads the bf16 weights as they are. "dropped": the pages of the model and of what was kept are dropped before
(by posix_fadvise; libraries stay). Starts take turns; medians count. Phases of quire, in seconds, are of the same runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS, ROOT
from benchmarks.peers.engines import job
from quire.bench.suite.engines import FOREIGN, gguf_file
from quire.bench.suite.environments import environment
from quire.bench.suite.foreign.shapes import write_checkpoint

CASES: dict[str, dict[str, str]] = {"q4_k_m": {}, "bf16-int4": {"quantization": "int4"}}


def phases(model: str, options: dict[str, Any]) -> None:
    """Start quire in this process, print the first token's line, and say what took how long."""
    began = time.perf_counter()
    from quire.core.config import flat_config
    from quire.core.machine import uncollected
    from quire.model.load.packed_folder import ask_ahead

    config = flat_config(model=model, **options)
    ask_ahead(config.model)  # as `quire generate` does
    with uncollected(forever=True):
        from quire import LLM, SamplingParams
        from quire.engine import engine

    found = {"imports": time.perf_counter() - began}
    load, warm, tune = engine.load_model, engine.warm_up, engine.tune
    for name, what in (("load_model", load), ("warm_up", warm), ("tune", tune)):
        setattr(engine, name, _timed(name, what, found))
    with uncollected(forever=True):
        llm = LLM.from_config(config)
    began = time.perf_counter()
    for _ in llm.stream("hello", SamplingParams(max_tokens=1, temperature=0.0)):
        found["first token"] = time.perf_counter() - began
        print(json.dumps(found), flush=True)
    writing = llm.engine.engine.model.writing
    if writing is not None:  # nobody waits for it elsewhere; here the next start shall find it on a busy machine too
        writing.finish(600)


def _timed(name: str, call: Any, into: dict[str, float]) -> Any:
    def timed(*facts: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*facts)
        finally:
            into[name] = time.perf_counter() - began

    return timed


def files_of(path: Path) -> list[Path]:
    """A file itself, or those of a folder."""
    return [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]


def drop(*paths: Path) -> None:
    """Write the files' pages out and have the system forget them."""
    for path in (file for found in paths for file in files_of(found)):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def start(words: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Seconds until the first line, and what it says. `SystemExit` when there is none."""
    began = time.perf_counter()
    with subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
    if not line:
        raise SystemExit(f"exit code {process.returncode} from: {' '.join(words)}")
    told: dict[str, float] = json.loads(line)
    return {"start": seconds} | told


class Starts:
    """The processes of one case; `kept` is what quire keeps for later starts."""

    def __init__(self, args: argparse.Namespace, case: str, kept: Path) -> None:
        asked = job(args.work, "llama-1b", "q4_k_m" if case == "q4_k_m" else "bf16", args.threads)
        env = environment(args.work, "llama")
        theirs = gguf_file(asked)
        ours = theirs if not CASES[case] else asked.file("llama-1b-bf16", lambda f: write_checkpoint("llama-1b", f))
        options = json.dumps({"threads": args.threads, "max_model_len": 2048} | CASES[case])
        self.kept, self.files, self._keeps = kept, [theirs, ours], bool(CASES[case])
        self._quire = [sys.executable, "-m", "benchmarks.start.first_token", "--start", str(ours), options]
        self._theirs = [env.python, str(FOREIGN / "peer_llama_cpp.py"), "first", str(theirs), str(args.threads)]
        self._variables = env.variables

    def run(self, what: str, dropped: bool) -> dict[str, float]:
        """One start: "llama.cpp", "first" or "later" of quire."""
        if what == "first":
            for file in files_of(self.kept):
                file.unlink()
        if dropped:
            drop(*self.files, self.kept)
        else:
            for path in (file for found in (*self.files, self.kept) for file in files_of(found)):
                _read(path)
        if what == "llama.cpp":
            return start(self._theirs, self._variables)
        found = start(self._quire, {"XDG_CACHE_HOME": str(self.kept)})
        if self._keeps and not list(self.kept.glob("quire/packed/packed-*")):
            raise SystemExit(f"nothing was kept in {self.kept}: is the disk nearly full?")
        return found


def _read(path: Path) -> None:
    """Have the file's pages in memory."""
    with path.open("rb") as file:
        while file.read(16 << 20):
            pass


def measure(args: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    """A row for the weights in memory and for those on disk."""
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work) as kept:
        starts = Starts(args, case, Path(kept))
        for dropped in (False, True):
            found: dict[str, list[dict[str, float]]] = {"llama.cpp": [], "first": [], "later": []}
            for _ in range(args.rounds):
                for what, runs in found.items():
                    runs.append(starts.run(what, dropped))
            medians = {
                what: {phase: statistics.median(run.get(phase, 0.0) for run in runs) for phase in runs[0]}
                for what, runs in found.items()
            }
            rows.append({"case": case, "pages": "dropped" if dropped else "warm", "threads": args.threads,
                         "rounds": args.rounds, "medians": medians, "machine": platform.processor(),
                         "starts": {what: [run["start"] for run in runs] for what, runs in found.items()}})  # fmt: skip
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    peer = row["medians"]["llama.cpp"]["start"]
    print(f"{row['case']}, pages {row['pages']}: llama.cpp {peer:.2f} s")
    for what in ("first", "later"):
        told = dict(row["medians"][what])
        seconds = told.pop("start")
        parts = ", ".join(f"{name} {value:.2f}" for name, value in told.items())
        print(
            f"  quire, {what:5s} start {seconds:6.2f} s = {seconds / peer:.2f} of llama.cpp's   ({parts})", flush=True
        )


def main() -> None:
    """Measure the asked cases, print them, write JSON."""
    if sys.argv[1:2] == ["--start"]:
        phases(sys.argv[2], json.loads(sys.argv[3]))
        return
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "starts.json")
    args = parser.parse_args()
    args.work = args.work.absolute()
    rows = [row for case in args.case for row in measure(args, case)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"unit": "seconds", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
