"""Texts a second of encoders, beside sentence-transformers, fastembed (ONNX Runtime) and llama.cpp.

    python -m benchmarks.serving.embeddings [--model minilm bge-small modernbert-base] [--rounds 5] [--threads N]
    python -m benchmarks.serving.embeddings --case 1x16 --engine "quire bfloat16" "fastembed float32"

`minilm` has the weights of all-MiniLM-L6-v2, the others random ones of the shape of bge-small-en-v1.5 and of
ModernBERT-base, all with the vocabulary of the first. Cases are texts in a call x tokens of each text; texts are made
of whole words. All engines are loaded at one time, one works at a time, they take turns; given are the medians of the
rounds in texts a second, and the ratio of quire to each in the same round. Cosines are between an engine's vectors and
those of sentence-transformers in float32. Results: results/embeddings.json, by processor.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import keep, parser_of
from benchmarks.serving.embedding_models import MODELS, EmbeddingModel, made_model
from quire.bench.suite.environments import environment
from quire.bench.suite.limits import Probe
from quire.bench.suite.process import Command, Process
from quire.figures.machine import this_machine
from quire.ops.native import Native

HERE = Path(__file__).parent
CASES = {"1x16": (1, 16), "1x512": (1, 512), "64x16": (64, 16), "64x512": (64, 512)}
"""Texts in a call, and tokens of each with the special ones."""
ENVIRONMENTS = {"sentence-transformers": "sentence_transformers", "fastembed": "fastembed", "llama.cpp": "llama"}
ENGINES = (
    "quire float32",
    "quire bfloat16",
    "quire int8",
    "sentence-transformers float32",
    "sentence-transformers bfloat16",
    "fastembed float32",
    "fastembed int8",
    "llama.cpp f16",
    "llama.cpp q8_0",
)
LEAST_SECONDS = 0.5
"""A call is repeated until a round of an engine takes about that long."""


@dataclass
class Engine:
    """A process, and how often a round calls it in each case."""

    name: str
    process: Process
    times: int = 1


def start(name: str, model: EmbeddingModel, args: argparse.Namespace) -> Engine:
    """Load an engine."""
    engine, kind = name.rsplit(" ", 1)
    python, variables = sys.executable, dict[str, str]()
    if engine in ENVIRONMENTS:
        made = environment(args.work, ENVIRONMENTS[engine])
        python, variables = made.python, made.variables
    path = model.onnx if engine == "fastembed" else model.gguf(kind)
    words = [python, str(HERE / "embedding_engines.py"), engine, str(path), kind, str(args.threads), model.pooling]
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    log = args.work / "embeddings.log"
    return Engine(name, Process(name, Command(words, variables | threads), log))


def texts_of(model: EmbeddingModel, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of exactly `tokens` tokens, of whole words of the vocabulary."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(model.words, k=tokens - 2)) for _ in range(count)]


def measured(model: EmbeddingModel, engines: list[Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of every case: engine -> texts a second of each round."""
    found: dict[str, Any] = {}
    for case in args.case:
        count, tokens = CASES[case]
        texts = texts_of(model, count, tokens, 1)
        for engine in engines:
            first = engine.process.ask({"do": "embed", "texts": texts, "times": 1})["seconds"][0]
            if first < LEAST_SECONDS:
                first = engine.process.ask({"do": "embed", "texts": texts, "times": 1})["seconds"][0]
            engine.times = max(1, min(200, round(LEAST_SECONDS / first)))
        rounds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for number in range(args.rounds):
            for engine in engines if number % 2 else engines[::-1]:
                asked = {"do": "embed", "texts": texts, "times": engine.times}
                took = engine.process.ask(asked)["seconds"]
                rounds[engine.name].append(count / statistics.median(took))
        found[case] = {name: round(statistics.median(rates), 2) for name, rates in rounds.items()}
        found[case] |= {"ratios": ratios(rounds)}
        print(model.name, case, json.dumps(found[case], indent=1), flush=True)
    return found


def ratios(rounds: dict[str, list[float]]) -> dict[str, float]:
    """Of each engine of quire, the median ratio to each other in the same round."""
    ours = [name for name in rounds if name.startswith("quire")]
    theirs = [name for name in rounds if name not in ours]
    return {
        f"{own} / {other}": round(statistics.median(a / b for a, b in zip(rounds[own], rounds[other], strict=True)), 3)
        for own in ours
        for other in theirs
    }


def cosines(model: EmbeddingModel, engines: list[Engine]) -> dict[str, float]:
    """The least cosine of each engine's vectors and those of sentence-transformers in float32, of 64 texts."""
    texts = [text for tokens in (4, 16, 64, 256) for text in texts_of(model, 16, tokens, tokens)]
    made = {e.name: np.array(e.process.ask({"do": "vectors", "texts": texts})["vectors"]) for e in engines}
    want = made.get("sentence-transformers float32")
    if want is None:
        return {}
    unit = {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in (made | {"": want}).items()}
    return {name: round(float((unit[name] * unit[""]).sum(1).min()), 7) for name in made}


def main() -> None:
    """Measure what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minilm", type=Path, required=True, help="folder of the real model")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="environments of others, and models")
    args = parser.parse_args()
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    limits = Probe().limits()
    for name in args.model:
        model = made_model(name, args.minilm, args.work)
        engines = [start(engine, model, args) for engine in args.engine]
        try:
            same = cosines(model, engines)
            print(name, "cosines", json.dumps(same, indent=1), flush=True)
            found = measured(model, engines, args)
        finally:
            for engine in engines:
                engine.process.close()
        machine = this_machine()
        facts = {"machine": machine.name, "limits": limits, "cosines": same, "texts_per_s": found}
        keep("embeddings", {f"{name}, {machine.name} ({Native().isa})": facts})


if __name__ == "__main__":
    main()
