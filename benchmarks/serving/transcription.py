"""How fast speech is written down, beside faster-whisper (CTranslate2) and whisper.cpp (pywhispercpp).

    python -m benchmarks.serving.transcription --whisper FOLDER --ctranslate2 FOLDER --sound FILE [--rounds 5]

--whisper is a folder of transformers, --ctranslate2 the same weights as faster-whisper reads them; whisper.cpp's file
is made of the former. The sound is a wav file of 16 kHz. All are greedy, windows know no text of earlier ones.
Engines are loaded at one time and take turns; given are the medians of the rounds: seconds, the real-time factor
(seconds of work per second of sound), quire's speed relative to each in the same round, and words that differ from
those of faster-whisper in float32. Results: results/transcription.json, by processor.
"""

from __future__ import annotations

import argparse
import difflib
import json
import statistics
import sys
import wave
from pathlib import Path
from typing import Any

from benchmarks.common.results import keep, parser_of
from benchmarks.serving.whisper_ggml import write_ggml
from quire.bench.suite.environments import environment
from quire.bench.suite.process import Command, Process
from quire.figures.machine import this_machine
from quire.ops.native import Native

HERE = Path(__file__).parent
ENVIRONMENTS = {"faster-whisper": "faster_whisper", "whisper.cpp": "whisper_cpp"}
ENGINES = (
    "quire float32",
    "quire bfloat16",
    "quire int8",
    "faster-whisper float32",
    "faster-whisper int8",
    "whisper.cpp f16",
)


def start(name: str, args: argparse.Namespace) -> Process:
    """Load an engine."""
    engine, kind = name.rsplit(" ", 1)
    python, variables, model = sys.executable, dict[str, str](), args.whisper
    if engine in ENVIRONMENTS:
        made = environment(args.work, ENVIRONMENTS[engine])
        python, variables = made.python, made.variables
    if engine == "faster-whisper":
        model = args.ctranslate2
    if engine == "whisper.cpp":
        model = args.work / f"{args.whisper.name}-ggml.bin"
        if not model.exists():
            write_ggml(args.whisper, model)
    words = [python, str(HERE / "transcription_engines.py"), engine, str(model.absolute()), kind, str(args.threads)]
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    return Process(name, Command(words, variables | threads), args.work / "transcription.log")


def plain(words: list[str]) -> list[str]:
    """Words without marks and capitals."""
    return [kept for word in words if (kept := "".join(c for c in word.lower() if c.isalnum()))]


def differing(one: list[str], other: list[str]) -> int:
    """Words of either that the other has not at that place."""
    matcher = difflib.SequenceMatcher(None, plain(one), plain(other), autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def measured(engines: dict[str, Process], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns, after one that does not count."""
    asked = {"do": "transcribe", "file": str(args.sound.absolute())}
    with wave.open(str(args.sound)) as file:
        long = file.getnframes() / file.getframerate()
    words = {name: process.ask(asked)["words"] for name, process in engines.items()}
    took: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(args.rounds):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            took[name].append(engines[name].ask(asked)["seconds"])
    want = words.get("faster-whisper float32", [])
    ours = [name for name in engines if name.startswith("quire")]
    ratios = {
        f"{own} / {other}": round(statistics.median(b / a for a, b in zip(took[own], took[other], strict=True)), 2)
        for own in ours
        for other in engines
        if other not in ours
    }
    return {
        "sound_s": round(long, 2),
        "words": len(plain(want)),
        "engines": {
            name: {
                "seconds": round(statistics.median(times), 3),
                "real_time_factor": round(statistics.median(times) / long, 4),
                "words_that_differ": differing(words[name], want),
            }
            for name, times in took.items()
        },
        "speed": ratios,
    }


def main() -> None:
    """Measure what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--whisper", type=Path, required=True)
    parser.add_argument("--ctranslate2", type=Path, required=True)
    parser.add_argument("--sound", type=Path, required=True)
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="environments of others")
    args = parser.parse_args()
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    engines = {name: start(name, args) for name in args.engine}
    try:
        found = measured(engines, args)
    finally:
        for process in engines.values():
            process.close()
    print(json.dumps(found, indent=1))
    keep("transcription", {f"{args.whisper.name}, {this_machine().name} ({Native().isa})": found})


if __name__ == "__main__":
    main()
