"""Training on the embedded model, and what it wins back: exact answers to its 4,000 questions, and held-out text.

    python -m benchmarks.compress.training ...

    qat      int4, a scale for 64 columns and for 32: rounded to nearest, and trained
    prune    half of the weights of each matrix zero, by two methods: as it is, trained
    student  half of the layers: trained on text alone, and by the teacher
    facts    QLoRA: 200 names that the model was not taught

Text is what the model was trained on (`training/data.py`): questions in the form that is asked, and pieces of code.
Everything is made by `quire compress` and `quire train` and counted by `quire eval`, from a folder's files alone. What
is below --work is not made again, and a run that was stopped goes on. `recovered`: of the answers that were lost, the
share that is right again. `seconds`: of the command that trained.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.common.results import ROOT, measure, parser_of

sys.path.insert(0, str(ROOT / "training"))
import data

PYDOC = ROOT / "src" / "quire" / "assets" / "pydoc"
QUIRE = [sys.executable, "-m", "quire"]
NEW = 200
TIMES = 6
"""How often a new name is told for each time that an old one is."""
PIECES, CHARACTERS = 2000, 500
"""Of code: rows of 128 tokens or so."""


def write_lines(path: Path, lines: Iterable[Mapping[str, str]]) -> Path:
    """A .jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def told(questions: Iterable[data.Question]) -> list[dict[str, str]]:
    """Questions as rows to learn from."""
    return [{"prompt": q.question, "completion": q.answer} for q in questions]


def code(path: Path) -> Path:
    """Pieces of the code that the model was trained on."""
    texts = data.code_texts()
    pieces = [text[at : at + CHARACTERS] for text in texts for at in range(0, len(text) - CHARACTERS, CHARACTERS)]
    return write_lines(path, ({"text": piece} for piece in random.Random(0).sample(pieces, PIECES)))


def made(out: Path, words: list[str], base: str | Path = "pydoc") -> float:
    """Seconds of `quire WORDS[0] BASE OUT WORDS[1:]`, where it was not run before; of the part that went on if it
    was stopped."""
    took = out.with_suffix(".seconds")
    if not took.exists():
        begun = time.monotonic()
        if not out.exists():
            subprocess.run([*QUIRE, words[0], str(base), str(out), *words[1:]], check=True)
        took.write_text(str(time.monotonic() - begun))
    return float(took.read_text())


def compressed(out: Path, stages: list[dict[str, Any]], base: str | Path = "pydoc", **calibration: Any) -> float:
    """As `made`, by a recipe."""
    recipe = out.with_suffix(".toml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    tables = [("[calibration]", {"text": "python"} | calibration), *(("[[stage]]", stage) for stage in stages)]
    lines = [line for head, table in tables for line in (head, *(f"{k} = {json.dumps(v)}" for k, v in table.items()))]
    recipe.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made(out, ["compress", "--recipe", str(recipe), "--no-passport"], base)


def found(work: Path, model: Path, asked: list[data.Question], *options: str) -> dict[str, Any]:
    """What `quire eval` counts of a folder that has the questions `asked` beside it. Weights are served in bf16 if
    `options` do not say otherwise."""
    folder = work / "asked" / "-".join((model.name, str(len(asked)), *options)).replace("--", "")
    out = folder.with_suffix(".json")
    if not out.exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        shutil.copyfile(PYDOC / "heldout.json", folder / "heldout.json")
        data.write_questions(folder, asked)
        words = ["eval", "--model", str(folder), "--dtype", "bfloat16", "--output", str(out), *options]
        subprocess.run([*QUIRE, *words], check=True)
    seen = json.loads(out.read_text())
    return {
        "right": seen["exact_answers"]["right"],
        "of": seen["exact_answers"]["total"],
        "bits_per_byte": seen["perplexity"]["bits_per_byte"],
    }


def recovered(source: dict[str, Any], lost: dict[str, Any], again: dict[str, Any]) -> float:
    """Share of the answers that `lost` has fewer than `source`."""
    share: float = (again["right"] - lost["right"]) / (source["right"] - lost["right"])
    return share


def qat(args: argparse.Namespace) -> dict[str, Any]:
    """Trained with the rounding that it is served with."""
    work, asked = args.work / "qat", data.read_questions(PYDOC)
    text = write_lines(work / "questions.jsonl", told(asked))
    source, rows = found(work, PYDOC, asked), dict[str, Any]()
    for group in (64, 32):
        served = "--quantization", "int4", "--group-size", str(group)
        stage = {
            "kind": "train", "method": "qat", "format": "int4", "group_size": group, "data": [str(text)], "steps": 84,
            "batch": 48, "learning_rate": 2e-4,
        }  # fmt: skip
        out = work / f"g{group}"
        seconds = compressed(out, [stage])
        lost, again = found(work, PYDOC, asked, *served), found(work, out, asked, *served)
        rows[f"int4 g{group}"] = {
            "source": source, "rounded": lost, "trained": again, "recovered": recovered(source, lost, again),
            "seconds": seconds,
        }  # fmt: skip
    return rows


def zeros(folder: Path) -> float:
    """Share of the weights of the layers' matrices that are zero."""
    weights = [t for name, t in load_file(folder / "model.safetensors").items() if "layers" in name and t.dim() == 2]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def prune(args: argparse.Namespace) -> dict[str, Any]:
    """Pruned, and trained since, in which zeros stay zeros."""
    work, asked = args.work / "prune", data.read_questions(PYDOC)
    texts = [write_lines(work / "questions.jsonl", told(asked)), code(work / "code.jsonl")]
    source, rows = found(work, PYDOC, asked), dict[str, Any]()
    for method in ("sparsegpt", "wanda"):
        cut, out = work / method, work / f"{method}-recovered"
        compressed(cut, [{"kind": "prune", "method": method, "sparsity": 0.5}], samples=64, length=256)
        stage = {
            "kind": "recover", "method": "full", "data": [str(text) for text in texts], "steps": 250, "batch": 36,
            "length": 128, "learning_rate": 1e-3,
        }  # fmt: skip
        seconds = compressed(out, [stage], cut)
        lost, again = found(work, cut, asked), found(work, out, asked)
        rows[method] = {
            "source": source, "pruned": lost, "trained": again, "recovered": recovered(source, lost, again),
            "zeros": zeros(out), "seconds": seconds,
        }  # fmt: skip
    return rows


def student(args: argparse.Namespace) -> dict[str, Any]:
    """The same layers to begin with, the same rows, in the same order."""
    work, asked = args.work / "student", data.read_questions(PYDOC)
    texts = [write_lines(work / "questions.jsonl", told(asked)), code(work / "code.jsonl")]
    rows: dict[str, Any] = {"source": found(work, PYDOC, asked)}
    for name, more in (("text", []), ("teacher", ["--teacher", "pydoc"])):
        words = ["train", "--method", "full", "--layers", "3", "--steps", "200", "--batch", "36", "--length", "128"]
        words += ["--rate", "1e-3", *more, *(word for text in texts for word in ("--data", str(text)))]
        seconds = made(work / name, words)
        rows[name] = found(work, work / name, asked) | {"seconds": seconds}
    return rows


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """The next names that `data.questions` would have chosen, told beside the old ones."""
    work, asked = args.work / "facts", data.read_questions(PYDOC)
    known = {q.name for q in asked}
    others = [q for q in data.questions(len(asked) + 4 * NEW) if q.name not in known]
    new = random.Random(0).sample(others, NEW)
    text = write_lines(work / "questions.jsonl", [*told(new) * TIMES, *told(asked)])
    words = ["train", "--method", "qlora", "--rank", "64", "--alpha", "128", "--rate", "2e-3", "--steps", "650"]
    seconds = made(work / "adapter", [*words, "--batch", "48", "--data", str(text)])
    made(work / "merged", ["train", "--merge", str(work / "adapter")])
    return {
        name: {"new": found(work, model, new), "old": found(work, model, asked)}
        for name, model in (("source", PYDOC), ("taught", work / "merged"))
    } | {"seconds": seconds}


PARTS = {"qat": qat, "prune": prune, "student": student, "facts": facts}


def main() -> None:
    """Make what was asked for, and keep what was counted in results/workbench.json."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--work", type=Path, default=Path("build/bench/workbench"))
    measure(PARTS, parser.parse_args(), "workbench")


if __name__ == "__main__":
    main()
