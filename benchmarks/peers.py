"""quire beside other engines on this machine: same shapes and threads, interleaved, medians and ratios.

    python benchmarks/peers.py --shape llama-1b --format q4_0 --rounds 3

Every engine is a process with its model loaded that waits (without spinning) for one command at a time, so only one of
them works at any moment: A, B, A, B ... Each peer lives in an environment of its own below --work, made on first use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_config

HERE = Path(__file__).parent
MEASURES: dict[str, dict[str, Any]] = {
    "prefill 512": {"do": "prefill", "tokens": 512},
    **{
        f"decode x{n}": {"do": "decode", "batch": n, "context": 128, "steps": 32 if n < 16 else 16}
        for n in (1, 4, 8, 16, 32)
    },
}


@dataclass(frozen=True)
class Pair:
    """What is compared with what: a peer's format and quire's options of the same size."""

    peer_format: str
    quire: dict[str, Any]


PAIRS = {
    "bf16": Pair("bf16", {"dtype": "bfloat16"}),
    "q8_0": Pair("q8_0", {"quantization": "int8", "group_size": 32}),
    "q4_0": Pair("q4_0", {"quantization": "int4", "group_size": 32}),
    "q4_0-g128": Pair("q4_0", {"quantization": "int4", "group_size": 128}),
}


class Process:
    """A measured engine."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")

    def ask(self, command: dict[str, Any]) -> float:
        """Tokens/s for one command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> None:
        """End of input ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def environment(work: Path, name: str, packages: list[str]) -> Path:
    """The python of an environment with `packages`, made on first use."""
    folder = work / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "ready").touch()
    return python


def llama_cpp(work: Path, config: Path, fmt: str, threads: int) -> list[str]:
    """The command of llama.cpp on a GGUF file of random weights; the wheel is built for this machine."""
    python = environment(work, "llama", ["llama-cpp-python", "gguf", "numpy"])
    script, model = HERE / "peer_llama_cpp.py", work / f"{config.parent.name}-{fmt}.gguf"
    if not model.exists():
        part = model.with_suffix(".part")
        subprocess.run([python, script, "make", config, fmt, part], check=True)
        part.rename(model)
    return [str(python), str(script), "run", str(model), str(threads)]


def measure(quire: Process, peer: Process, rounds: int) -> list[dict[str, Any]]:
    """Medians of interleaved rounds, and the median of the rounds' ratios."""
    rows = []
    for what, command in MEASURES.items():
        ours: list[float] = []
        theirs: list[float] = []
        quire.ask(command)  # the first run touches memory for the first time
        peer.ask(command)
        for _ in range(rounds):
            ours.append(quire.ask(command))
            theirs.append(peer.ask(command))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        row = {"measure": what, "quire": statistics.median(ours), "peer": statistics.median(theirs), "ratio": ratio}
        rows.append(row)
        print(
            f"  {what:12s} quire {row['quire']:8.1f}   {peer.name} {row['peer']:8.1f}   ratio {ratio:5.2f}", flush=True
        )
    return rows


def main() -> None:
    """Measure every asked combination, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["llama-1b", "qwen-0.6b"])
    parser.add_argument("--format", choices=PAIRS, nargs="+", default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "peers.json")
    args = parser.parse_args()
    results = []
    for shape in args.shape:
        folder = write_config(shape, args.work / shape)
        for name in args.format:
            pair = PAIRS[name]
            print(f"{shape}, {name}", flush=True)
            options = pair.quire | {"threads": args.threads}
            quire = Process("quire", [sys.executable, str(HERE / "peer_quire.py"), str(folder), json.dumps(options)])
            command = llama_cpp(args.work, folder / "config.json", pair.peer_format, args.threads)
            peer = Process("llama.cpp", command)
            rows = measure(quire, peer, args.rounds)
            results.append({"shape": shape, "format": name, "peer": "llama.cpp", "rows": rows})
            quire.close()
            peer.close()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
