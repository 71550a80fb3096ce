"""Memory and time of a run of `quire compress` of a model of a real shape, and what kills do to it.

    python -m benchmarks.compress.run_memory ...

    kills                llama-1b by GPTQ: undisturbed, then killed three times
    methods --layers 2   seconds and memory of each method, on a slice of layers
    passport --layers 2  the same of measuring what one of them cost

The weights are random numbers in bf16 on the disk, the calibration text is random words. Each run is the command in a
process of its own, whose memory is read from the kernel many times a second: `peak` is its resident set at most, mapped
files among it, `own` what is no file. One layer's work is what GPTQ must have of a layer at a time: its weights in f32,
a Hessian for each input that its matrices read, and the stream of all calibration text before it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import measure, parser_of
from quire.bench.suite.foreign.shapes import MATRICES, SHAPES, shape_of, write_checkpoint

GIB = 1 << 30
ALLOWED = 2 * GIB
"""Bytes that a run may hold over one layer's work."""
PERIOD = 0.02
"""Seconds between two looks at a process."""
METHODS: dict[str, list[str]] = {
    "rtn int4": ["--quantize", "rtn"],
    "gptq int4": ["--quantize", "gptq"],
    "awq int4": ["--quantize", "awq"],
    "smoothquant": ["--quantize", "smoothquant"],
    "llm_int8": ["--quantize", "llm_int8"],
    "fp8 dynamic": ["--quantize", "fp8"],
    "fp8 static": ["--quantize", "fp8", "--set", "scales=static"],
    "fp8 block": ["--quantize", "fp8", "--set", "scales=block"],
    "nf4": ["--quantize", "nf4"],
    "mxfp4": ["--quantize", "mxfp4"],
    "mixed": ["--quantize", "mixed", "--set", "bits_per_weight=4.5"],
    "gguf Q4_K": ["--quantize", "gguf"],
    "gguf Q8_0": ["--quantize", "gguf", "--set", "format=Q8_0"],
    "magnitude 50 %": ["--prune", "magnitude", "--set", "sparsity=0.5"],
    "wanda 2:4": ["--prune", "wanda", "--set", "pattern=2:4"],
    "sparsegpt 2:4": ["--prune", "sparsegpt", "--set", "pattern=2:4"],
    "layers by influence": ["--prune", "structured", "--set", "layers=1", "--set", "score=influence"],
    "channels by activation": ["--prune", "structured", "--set", "channels=0.25"],
}


@dataclass(frozen=True)
class Model:
    """A folder, what its layers are like, and the options of the command that say which text is looked at."""

    folder: Path
    config: dict[str, Any]
    text: list[str]


@dataclass
class Watched:
    """A run of the command: seconds, and bytes at most. `ended`: whether nobody killed it."""

    seconds: float
    peak: int = 0
    own: int = 0
    ended: bool = True

    def row(self) -> dict[str, Any]:
        """As figures are kept."""
        return {"seconds": round(self.seconds, 1), "peak_mib": self.peak >> 20, "own_mib": self.own >> 20}


def model_of(args: argparse.Namespace) -> Model:
    """The checkpoint and the text, written where they are not yet there."""
    config, name = SHAPES[args.shape], args.shape
    if args.layers:
        name = f"{args.shape}-{args.layers}"
        config = SHAPES[name] = config | {"num_hidden_layers": args.layers}
    folder = args.work.absolute() / name
    if not (folder / "config.json").exists():
        write_checkpoint(name, folder)
    words, text = random.Random(0), folder.parent / f"{name}.txt"
    count = 2 * args.samples * args.length  # a word is a token; pieces of documents end where they end
    text.write_text(" ".join(str(words.randrange(4, config["vocab_size"])) for _ in range(count)))
    sets = {"files": text, "samples": args.samples, "length": args.length}
    if args.spill:
        sets["spill"] = "true"
    return Model(folder, config, [w for key, value in sets.items() for w in ("--set", f"calibration.{key}={value}")])


def layer_work(model: Model, args: argparse.Namespace) -> dict[str, int]:
    """Bytes of one layer's work, by what they are of."""
    shapes = {name: shape_of(name, model.config) for name in MATRICES}
    hidden, wide = shapes["attn_q"][1], shapes["ffn_down"][1]
    inputs = (hidden, shapes["attn_output"][1], hidden, wide)
    return {
        "weights": 4 * sum(n * k for n, k in shapes.values()),
        "hessians": 4 * sum(k * k for k in inputs),
        "stream": 0 if args.spill else 4 * args.samples * args.length * hidden,
    }


def held(pid: int) -> tuple[int, int]:
    """Bytes of a process: its resident set at most so far, and what of it is no file now. 0 of one that is ending."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = dict(re.findall(r"(VmHWM|RssAnon):\s+(\d+) kB", status))
    return int(found.get("VmHWM", 0)) << 10, int(found.get("RssAnon", 0)) << 10


def watch(words: list[str], until: Callable[[float], bool] = lambda seconds: False) -> Watched:
    """Run `quire` with `words`, and kill it when `until(seconds since it began)`. `SystemExit` where it fails."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "quire", *words], stderr=subprocess.PIPE, text=True)
    found = Watched(0.0)
    try:
        while process.poll() is None:
            peak, own = held(process.pid)
            found.peak, found.own = max(found.peak, peak), max(found.own, own)
            if until(time.perf_counter() - began):
                found.ended = False
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(PERIOD)
    finally:
        process.kill()
        said = process.communicate()[1]
    found.seconds = time.perf_counter() - began
    if found.ended and process.returncode:
        raise SystemExit(f"quire {' '.join(words)}: {said}")
    return found


def compressed(model: Model, out: Path, method: list[str], *more: str) -> list[str]:
    """The words of a run."""
    return ["compress", str(model.folder), str(out), *method, *model.text, *more]


def sums(folder: Path) -> dict[str, str]:
    """sha256 of each file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {}
    for path in files:
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def lines(journal: Path) -> int:
    """Units that a run has finished so far."""
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """GPTQ undisturbed, and killed at random places and gone on: memory, seconds, the same bytes."""
    model, work = model_of(args), args.work.absolute()
    for name in ("whole", "cut", "cut.partial", "whole.partial"):
        shutil.rmtree(work / name, ignore_errors=True)
    words = METHODS["gptq int4"]
    whole = watch(compressed(model, work / "whole", words, "--no-passport"))
    wanted, layers = sums(work / "whole"), int(model.config["num_hidden_layers"])
    out, journal = work / "cut", work / "cut.partial" / "journal.jsonl"
    rng = random.Random(args.seed)
    places = sorted(rng.uniform(0, layers) for _ in range(args.kills))
    runs = []
    for place in places:
        reached = math.inf

        def there(seconds: float, place: float = place) -> bool:
            nonlocal reached
            if reached == math.inf and lines(journal) >= int(place):
                reached = seconds
            return seconds - reached >= place % 1 * whole.seconds / layers

        runs.append(watch(compressed(model, out, words, "--no-passport"), there))
        if runs[-1].ended:
            raise SystemExit(f"the run ended before it was at layer {place:.2f}")
    runs.append(watch(compressed(model, out, words, "--no-passport")))
    same, own = sums(out) == wanted, layer_work(model, args)
    over = max(run.peak for run in (whole, *runs)) - sum(own.values())
    found = {
        "undisturbed": whole.row(),
        "killed_at_layer": [round(place, 2) for place in places],
        "runs": [run.row() for run in runs],
        "layer_work_bytes": own,
        "over_layer_work_mib": over >> 20,
        "within_2_gib": over <= ALLOWED,
        "same_bytes": same,
        "sha256": wanted,
    }
    if not same or over > ALLOWED:
        raise SystemExit(f"not as it must be: {found}")
    return found


def methods(args: argparse.Namespace) -> dict[str, Any]:
    """Each method after the other."""
    model, out, found = model_of(args), args.work.absolute() / "out", {}
    for name, words in METHODS.items():
        if args.only and not any(name.startswith(only) for only in args.only):
            continue
        for folder in (out, out.with_name("out.partial")):
            shutil.rmtree(folder, ignore_errors=True)
        found[name] = watch(compressed(model, out, words, "--no-passport")).row()
        print(f"{name:24s} {found[name]}", flush=True)
    return found


def passport(args: argparse.Namespace) -> dict[str, Any]:
    """RTN, with a passport and without."""
    model, out, found = model_of(args), args.work.absolute() / "out", {}
    for option in ("--no-passport", "--passport"):
        for folder in (out, out.with_name("out.partial")):
            shutil.rmtree(folder, ignore_errors=True)
        found[option] = watch(compressed(model, out, METHODS["rtn int4"], option)).row()
    return found


WORK = {"kills": kills, "methods": methods, "passport": passport}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0 = as many as it has")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--spill", action="store_true", help="the stream lies on the disk")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="methods whose names begin so")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    measure(WORK, args, "compress_memory")


if __name__ == "__main__":
    main()
