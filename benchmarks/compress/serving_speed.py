"""Speed of what `quire compress` makes, served beside the dense model of the same bits: a model of a real shape.

    python -m benchmarks.compress.serving_speed ...

    sparse    without 2:4 zeros, and without half and three quarters of all numbers
    outliers  LLM.int8() beside int8

Random weights that lie in a folder, zeros among them for `sparse`. Prefill is of one prompt of 512 tokens, decode of
one sequence and of sixteen, in turns. A ratio is the median of the ratios of neighbours in time; above 1: what was made
is faster.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.results import measure, parser_of
from benchmarks.engine.parallel_ranks import rate, requests_of
from quire.bench.suite.foreign.shapes import SHAPES, write_checkpoint
from quire.core.config import flat_config
from quire.engine.start import start_engine

LOADS = {"1": (1, 512), "16": (16, 32)}
"""Sequences at a time -> (sequences, tokens of each prompt)."""
TOKENS = 48
FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}


def dense_of(args: argparse.Namespace) -> Path:
    """The folder of the dense checkpoint, written where there is none."""
    folder = Path(args.work).absolute() / args.shape
    return folder if (folder / "model.safetensors").exists() else write_checkpoint(args.shape, folder)


def pruned(args: argparse.Namespace, zeros: str) -> Path:
    """The checkpoint with zeros in every matrix of its layers."""
    source, folder = dense_of(args), Path(args.work).absolute() / f"{args.shape}-{zeros.replace(':', 'of')}"
    if (folder / "model.safetensors").exists():
        return folder
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    g, made = torch.Generator().manual_seed(0), load_file(source / "model.safetensors")
    for name, w in made.items():
        if w.dim() == 2 and ".layers." in name:
            noise = torch.rand(w.shape, generator=g)
            if zeros == "2:4":
                kept = noise.view(len(w), -1, 4).argsort(-1).argsort(-1).view(w.shape) < 2
            else:
                kept = noise >= float(zeros)
            made[name] = w * kept
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def compare(args: argparse.Namespace, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Two engines, `ways` their options by name: rates of both, and how much faster the second is."""
    found: dict[str, Any] = {}
    own = {"max_model_len": 1024, "device": "cpu", "threads": args.threads, "cache_packed": "off"}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(start_engine(flat_config(**own, **way)))) for name, way in ways.items()
        }
        for load, (count, length) in LOADS.items():
            turns = [
                [rate(engine, requests_of(args, count, length, TOKENS, turn)) for engine in engines.values()]
                for turn in range(args.rounds + 1)
            ][1:]
            for i, what in enumerate(("prefill", "decode")):
                rates = [[phases[i].rate for phases in turn] for turn in turns]
                medians = {name: statistics.median(each[j] for each in rates) for j, name in enumerate(ways)}
                ratio = statistics.median(after / before for before, after in rates)
                found[f"{what} of {load}"] = {**medians, "ratio": round(ratio, 3)}
    return found


def sparse(args: argparse.Namespace) -> dict[str, Any]:
    """By format and zeros."""
    found = {}
    for zeros in args.zeros:
        folder = pruned(args, zeros)
        for name in args.formats:
            own = {"model": str(folder), "quantization": FORMATS[name]}
            ways = {"dense": own | {"sparse": "off"}, "sparse": own | {"sparse": args.sparse}}
            found[f"{zeros} {name}"] = compare(args, ways)
            print(zeros, name, found[f"{zeros} {name}"], flush=True)
        shutil.rmtree(folder)
    return found


def outliers(args: argparse.Namespace) -> dict[str, Any]:
    """LLM.int8() as the workbench writes it, and int8 as the loader rounds."""
    source, made = dense_of(args), args.work.absolute() / f"{args.shape}-llm_int8"
    if not made.exists():
        words = ["compress", str(source), str(made), "--quantize", "llm_int8", "--no-passport"]
        subprocess.run([sys.executable, "-m", "quire", *words], check=True)
    own = {"quantization": args.quantization, "model": str(source)}
    return compare(args, {"int8": own, "LLM.int8()": {"model": str(made)}})


WORK = {"sparse": sparse, "outliers": outliers}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--zeros", nargs="+", default=["2:4", "0.5", "0.75"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--sparse", choices=("auto", "on"), default="on")
    parser.add_argument("--quantization", default="int8", help="what LLM.int8() stands beside")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    measure(WORK, parser.parse_args(), "smaller")


if __name__ == "__main__":
    main()
