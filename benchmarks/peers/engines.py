"""Engines beside each other on this machine, quire and its peers, in turns: medians and ratios.

    python -m benchmarks.peers.engines                                               the whole table
    python -m benchmarks.peers.engines --shape llama-1b --peer llama.cpp --format q4_0 --measure "prefill 512"

Every engine is a process with its model loaded that waits (without spinning) for one command at a time, so only one of
them works at any moment: A, B, A, B ... after one unmeasured run of each. A row is written to --output as soon as it is
there; rows that are in that file are not measured again (--again does). Each peer lives in an environment of its own
below --work, made on first use, with the model files it needs. Prompts are arbitrary token ids, never seen before, and
prefix caches are off. Decode: tokens of whole steps / their time, counted when all prompts have been computed. `limit`,
at batch 1: steps/s if quire's weights were read at the best rate that plain reading loops reach in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS
from quire.bench.suite.engines import EngineJob, gguf_file, llama_cpp, openvino, vllm
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.bench.suite.process import Command, Process
from quire.bench.suite.suite_models import source_of

HERE = Path(__file__).parent
MEASURES: dict[str, dict[str, Any]] = {
    "prefill 512": {"do": "prefill", "tokens": 512},
    **{
        f"decode x{n}": {"do": "decode", "batch": n, "context": 128, "steps": 32 if n < 16 else 16}
        for n in (1, 4, 8, 16, 32)
    },
}
USUAL = ["prefill 512", "decode x1", "decode x16"]


def job(work: Path, shape: str, fmt: str, threads: int) -> EngineJob:
    """What a peer is asked to load: a shape in a format of its own. Environments that are missing are made."""
    return EngineJob(work, source_of(shape, work), fmt, threads, make=True)


PEERS: dict[str, Callable[[EngineJob], Command]] = {"llama.cpp": llama_cpp, "openvino": openvino, "vllm": vllm}


@dataclass(frozen=True)
class Pair:
    """What is compared with what: a peer's format and quire's options of the same size, or both on one GGUF file."""

    peer: str
    name: str
    peer_format: str
    quire: dict[str, Any]
    same_file: bool = False


PAIRS = [
    Pair("llama.cpp", "q4_0", "q4_0", {"quantization": "int4", "group_size": 32}),
    Pair("llama.cpp", "q4_0-g128", "q4_0", {"quantization": "int4", "group_size": 128}),
    Pair("llama.cpp", "q8_0", "q8_0", {"quantization": "int8", "group_size": 32}),
    Pair("llama.cpp", "q8_0-g128", "q8_0", {"quantization": "int8", "group_size": 128}),
    Pair("llama.cpp", "bf16", "bf16", {"dtype": "bfloat16"}),
    Pair("llama.cpp", "bf16-12", "bf16", {"dtype": "bfloat16", "bf16_bits": 12}),
    *(Pair("llama.cpp", name, name, {}, same_file=True) for name in ("q4_k_m", "q5_k_m", "q6_k", "q3_k_m", "iq4_xs")),
    Pair("openvino", "int4", "int4", {"quantization": "int4", "group_size": 128}),
    Pair("openvino", "int8", "int8", {"quantization": "int8", "group_size": 128}),
    Pair("vllm", "bf16", "bfloat16", {"dtype": "bfloat16"}),
    Pair("vllm", "bf16-12", "bfloat16", {"dtype": "bfloat16", "bf16_bits": 12}),
]


def quire_process(folder: Path, options: dict[str, Any], log: Path) -> Process:
    """quire on a GGUF file, or on made-up weights of a folder's config, in this environment."""
    return Process(
        "quire", Command([sys.executable, str(HERE / "quire_process.py"), str(folder), json.dumps(options)]), log
    )


def measure(quire: Process, peer: Process, what: str, rounds: int) -> dict[str, Any]:
    """Rates of interleaved rounds, their medians, and the median of the rounds' ratios."""
    ours: list[float] = []
    theirs: list[float] = []
    quire.rate(MEASURES[what])  # the first run touches memory for the first time
    peer.rate(MEASURES[what])
    limits: list[float] = []
    for _ in range(rounds):
        ours.append(quire.rate(MEASURES[what]))
        theirs.append(peer.rate(MEASURES[what]))
        if MEASURES[what].get("batch") == 1:
            limits.append(quire.rate({"do": "limit"}))
    most = {"limit": statistics.median(limits)} if limits else {}
    return most | {
        "quire_rate": statistics.median(ours),
        "peer_rate": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "rounds": {"quire": ours, "peer": theirs},
    }


class Results:
    """The JSON file: rows by (shape, peer, format, measure), saved after every one."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path, self._again = path, again
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[str, ...]:
        """What makes a row one row."""
        return tuple(row[name] for name in ("shape", "peer", "format", "measure"))

    def missing(self, shape: str, pair: Pair, measures: list[str]) -> list[str]:
        """Those of `measures` that have to be run."""
        have = set() if self._again else {self.key(row) for row in self.rows}
        return [m for m in measures if (shape, pair.peer, pair.name, m) not in have]

    def add(self, row: dict[str, Any]) -> None:
        """Replace or append, and save."""
        self.rows = [r for r in self.rows if self.key(r) != self.key(row)] + [row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"unit": "tokens/s", "rows": self.rows}, indent=1) + "\n")


def run_pair(args: argparse.Namespace, shape: str, pair: Pair, results: Results) -> None:
    """All measures of one pair that are missing."""
    measures = results.missing(shape, pair, args.measure)
    if not measures:
        return
    started = time.perf_counter()
    asked = job(args.work, shape, pair.peer_format, args.threads)
    folder = gguf_file(asked) if pair.same_file else write_config(shape, args.work / shape)
    command = PEERS[pair.peer](asked)
    peer = Process(pair.peer, command, args.work / f"{pair.peer}.log")
    quire = quire_process(folder, pair.quire | {"threads": args.threads}, args.work / "quire.log")
    print(f"{shape}, {pair.peer} {pair.name}: loaded in {time.perf_counter() - started:.0f} s", flush=True)
    about = {
        "shape": shape,
        "peer": pair.peer,
        "format": pair.name,
        "options": pair.quire,
        "threads": args.threads,
        "facts": {"quire": quire.facts, "peer": peer.facts},
    }
    for what in measures:
        found = measure(quire, peer, what, args.rounds)
        results.add(about | {"measure": what, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | found)
        print(f"  {what:12s} quire {found['quire_rate']:8.1f}   {pair.peer} {found['peer_rate']:8.1f}   "
              f"ratio {found['ratio']:5.2f}", flush=True)  # fmt: skip
    quire.close()
    peer.close()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table: quire / peer = ratio for each measure."""
    measures = [m for m in MEASURES if any(row["measure"] == m for row in rows)]
    lines = [f"| shape | quire | peer | {' | '.join(measures)} |", "|---" * (3 + len(measures)) + "|"]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        options = row["options"]
        ours = f"{options['quantization']} g{options['group_size']}" if "quantization" in options else "bf16"
        ours = "the same file" if any(p.same_file and p.name == row["format"] for p in PAIRS) else ours
        theirs = f"{row['peer']} {row['format'].removesuffix('-g128')}"
        cell = f"{row['quire_rate']:.1f} / {row['peer_rate']:.1f} = **{row['ratio']:.2f}**"
        if "limit" in row:
            cell += f" (limit {row['limit']:.1f})"
        cells.setdefault((row["shape"], ours, theirs), {})[row["measure"]] = cell
    lines += [f"| {' | '.join(key)} | {' | '.join(c.get(m, '') for m in measures)} |" for key, c in cells.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure every asked row that is missing, print the table, write JSON."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = sorted({p.name for p in PAIRS})
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["llama-1b", "qwen-0.6b"])
    parser.add_argument("--peer", choices=PEERS, nargs="+", default=list(PEERS))
    parser.add_argument("--format", choices=formats, nargs="+", default=formats, help="format of the peer")
    parser.add_argument("--measure", choices=MEASURES, nargs="+", default=USUAL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure rows again that --output already has")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers",
                        help="environments and model files, 20 GB")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.json")
    args = parser.parse_args()
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    results = Results(args.output, args.again)
    for shape in args.shape:
        for pair in PAIRS:
            if pair.peer in args.peer and pair.name in args.format:
                run_pair(args, shape, pair, results)
    print(table(results.rows))


if __name__ == "__main__":
    main()
