"""Compression by quire and by other tools: quality, time and memory, side by side.

    python -m benchmarks.compress.tools                                   every method, beside every tool that has it
    python -m benchmarks.compress.tools --method gptq4_g64 --tool llmcompressor
    python -m benchmarks.compress.tools --rows 16 --length 128            a quick try
    python -m benchmarks.compress.tools --model smollm2 --rows 32         methods of `SMOLLM2`, on a published model
    python -m benchmarks.compress.tools --table                           what --output holds, as Markdown

The model is the embedded one, the calibration text the same token ids for all. `--model smollm2` takes SmolLM2-135M as
smollm2.py has it in float32, calibrates on quire's general text, and measures on prose, code and dialogue. Each tool
runs in an environment of its own below --work, each method in a process of its own. KL(source || made) in nats a token
and top-1 agreement are measured by quire for all of them alike, as `quire eval --against` does: the folder that was
written is read in float32, over the modules of heldout.json. `seconds` are those of loading, compressing and writing,
after the imports, `total` those of the process; `cpu` what processors worked for the former, which says something on a
machine that is not idle. `peak` is of the process, `above` what it is over the memory after the imports. Groups are of
64 columns, as 704, which the model's MLP has, and 576, which SmolLM2 has, are no multiples of 128.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS, parser_of
from benchmarks.compress import smollm2
from quire.bench.quality import TEXT, heldout_texts
from quire.bench.suite.environments import environment
from quire.compress.evaluation.quality_measurement import compare
from quire.compress.pipelines.recipe_runner import calibration_text
from quire.compress.recipes.parser import recipe_of
from quire.core.config import EngineConfig, flat_config
from quire.core.errors import QuireError
from quire.model.describe import describe
from quire.model.disk.checkpoint import EMBEDDED

HERE = Path(__file__).parent
TOOLS = ("llmcompressor", "gptqmodel", "autoawq", "bitsandbytes")
MIB = 1 << 20


@dataclass(frozen=True)
class Method:
    """A stage of ours, and the tools that have the same. `layout`: of our files, auto = the method's; `then`: stages
    behind it."""

    stage: dict[str, Any]
    tools: tuple[str, ...] = ()
    layout: str = "auto"
    then: tuple[dict[str, Any], ...] = ()

    def recipe(self, rows: int, length: int, spill: bool = False, text: str = "python") -> dict[str, Any]:
        """Our recipe of it, calibrated with `rows` of `length` tokens, which `spill` to the disk between layers."""
        return {
            "calibration": {"text": text, "samples": rows, "length": length, "spill": spill},
            "stage": [self.stage, *self.then],
            "output": {"layout": self.layout},
        }


def _quantize(method: str, **options: Any) -> dict[str, Any]:
    return {"kind": "quantize", "method": method, **options}


RECOVERY = {
    "kind": "recover", "method": "full", "data": [str(TEXT / "calibration.jsonl")], "steps": 60, "batch": 2,
    "length": 256, "learning_rate": 5e-5,
}  # fmt: skip
METHODS = {
    "rtn4": Method(_quantize("rtn", bits=4, group_size=64), ("llmcompressor",)),
    "rtn8": Method(_quantize("rtn", bits=8, group_size=64), ("llmcompressor",)),
    "gptq4_g64": Method(_quantize("gptq", bits=4, group_size=64), ("llmcompressor", "gptqmodel")),
    "gptq4_g32": Method(_quantize("gptq", bits=4, group_size=32), ("llmcompressor",)),
    "gptq4_act_order": Method(_quantize("gptq", bits=4, group_size=64, static_groups=False), ("gptqmodel",)),
    "awq4": Method(_quantize("awq", bits=4, group_size=64), ("llmcompressor", "autoawq")),
    "smoothquant": Method(_quantize("smoothquant"), ("llmcompressor",)),
    "fp8_dynamic": Method(_quantize("fp8", scales="dynamic"), ("llmcompressor",)),
    "fp8_static": Method(_quantize("fp8", scales="static"), ("llmcompressor",)),
    "sparsegpt": Method({"kind": "prune", "method": "sparsegpt", "pattern": "2:4"}, ("llmcompressor",)),
    "sparsegpt_recovered": Method({"kind": "prune", "method": "sparsegpt", "pattern": "2:4"}, then=(RECOVERY,)),
    "wanda": Method({"kind": "prune", "method": "wanda", "pattern": "2:4"}, ("llmcompressor",)),
    "nf4": Method(_quantize("nf4", block_size=64), ("bitsandbytes",)),
    "uniform4": Method(_quantize("gptq", bits=4, group_size=64, act_order=False), layout="compressed-tensors"),
    "mixed4": Method(_quantize("mixed", bits_per_weight=4.0, choices=[3, 4, 8], group_size=64)),
}
ABOVE = {"gptq4_g64": "rtn4", "awq4": "rtn4", "mixed4": "uniform4", "sparsegpt_recovered": "sparsegpt"}
"""Method -> one of its size that is to lose more. `uniform4` is what `mixed4` rounds by, and its layout, with the same
bits in every layer."""
SMOLLM2 = ("rtn4", "gptq4_g64", "gptq4_g32", "awq4", "sparsegpt", "sparsegpt_recovered", "nf4")
"""Methods that are measured on it unless others are asked for."""
MODELS = {"pydoc": tuple(name for name in METHODS if name not in ("sparsegpt_recovered", "nf4")), "smollm2": SMOLLM2}
"""Model -> the methods that are measured on it where none is asked for."""
COLUMNS = {
    "KL": ("kl", 1, ".5f"),
    "s": ("seconds", 1, ".1f"),
    "cpu s": ("cpu", 1, ".1f"),
    "peak MiB": ("peak", MIB, ".0f"),
    "above imports": ("above", MIB, ".0f"),
}
"""Of the table: name -> figure, its unit and how it is written."""


@dataclass
class Bench:
    """The source, the text and where things are; `rows` and `length`: of the calibration text, which ours may spill.

    `text`: the name that recipes call it by."""

    work: Path
    rows: int
    length: int
    folder: Path
    spill: bool = False
    texts: dict[str, str] = field(default_factory=lambda: heldout_texts(EMBEDDED))
    model: str = "pydoc"
    source: Path = EMBEDDED
    text: str = "python"

    @property
    def recipe(self) -> dict[str, Any]:
        """What recipes are told of the calibration text."""
        return {"rows": self.rows, "length": self.length, "spill": self.spill, "text": self.text}

    def measured(self, method: str, tool: str) -> dict[str, Any]:
        """A row: what `tool` makes by `method`, in a process of its own."""
        out = self.folder / f"{method}-{tool}"
        job: dict[str, Any] = {"source": str(self.source), "rows": str(self._rows()), "out": str(out), "method": method}
        python, variables = sys.executable, dict[str, str]()
        if tool == "quire":
            job |= {"method": "compress", "recipe": METHODS[method].recipe(**self.recipe)}
        else:
            env = environment(self.work, tool)
            python, variables = env.python, env.variables
        log = self.folder / f"{out.name}.log"
        began = time.perf_counter()
        with log.open("w") as errors:
            done = subprocess.run(
                [python, "-P", str(HERE / "tool_process.py"), tool, json.dumps(job)], cwd=self.folder, text=True,
                env=os.environ | variables, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        total = time.perf_counter() - began
        row: dict[str, Any] = {"model": self.model, "method": method, "tool": tool}
        row |= {"rows": self.rows, "length": self.length}
        if done.returncode:
            said = " ".join((done.stdout + log.read_text()).split()[-40:])
            return row | {"failed": f"code {done.returncode}: {said}"}
        took = json.loads(done.stdout.splitlines()[-1])
        row |= {
            "seconds": took["seconds"],
            "cpu": took["cpu"],
            "total": total,
            "peak": took["peak"],
            "above": took["peak"] - took["imports"],
        }
        try:
            row |= self._quality(out)
            return row if row["kl"] else row | {"failed": "nothing was changed"}
        except QuireError as error:
            return row | {"failed": error.message}
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _rows(self) -> Path:
        """The file of calibration token ids."""
        path = self.folder / "rows.json"
        if not path.exists():
            asked = recipe_of(METHODS["rtn4"].recipe(**self.recipe), "the benchmark's recipe")
            path.write_text(json.dumps(calibration_text(self.source, asked).tokens))
        return path

    def _quality(self, out: Path) -> dict[str, Any]:
        configs = [_exact(folder) for folder in (self.source, out)]
        models = [describe(str(folder), "auto") for folder in (self.source, out)]
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        found, _ = compare(configs[1], configs[0], models, self.texts, scratch)
        return {
            "kl": found.kl / found.compared,
            "top1": found.same / found.compared,
            "bytes": models[1].bytes_on_disk,
        }


def _exact(folder: Path) -> EngineConfig:
    """How both are read: nothing is rounded but what the files say is."""
    return flat_config(model=str(folder), dtype="float32", kv_cache_dtype="float32", cache_packed="off")


class Kept:
    """The rows of a file of results; a row that is measured again takes the place of the old one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the file too."""
        self.rows = [r for r in self.rows if _key(r) != _key(row)] + [row]
        names = [*METHODS]
        tools, models = ("quire", *TOOLS), [*MODELS]
        self.rows.sort(key=lambda r: (models.index(r["model"]), names.index(r["method"]), tools.index(r["tool"])))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.rows, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["method"], row["tool"]


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    begin = f"{row['model']:8} {row['method']:20} {row['tool']:14}"
    if "failed" in row:
        return f"{begin} failed: {row['failed']}"
    return (
        f"{begin} KL {row['kl']:.6f}  top-1 {100 * row['top1']:.2f} %  {row['seconds']:6.1f} s (cpu {row['cpu']:.1f}, "
        f"total {row['total']:.1f})  peak {row['peak'] / MIB:.0f} MiB "
        f"({row['above'] / MIB:.0f} above imports)  {row['bytes'] / MIB:.2f} MiB"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a line for each method and tool with our figures, theirs, and ours as a share of theirs; then a line
    for each method that is to beat a simpler one."""
    found = {_key(row): row for row in rows if "failed" not in row}
    lines = ["| model | method | beside | " + " | ".join(COLUMNS) + " |", "|---" * (3 + len(COLUMNS)) + "|"]
    for (model, name, tool), theirs in found.items():
        ours = found.get((model, name, "quire"))
        if tool == "quire" or ours is None:
            continue
        cells = [_pair(ours[column], theirs[column], unit, form) for column, unit, form in COLUMNS.values()]
        lines.append(f"| {model} | {name} | {tool} | " + " | ".join(cells) + " |")
    for model in MODELS:
        for name, simple in ABOVE.items():
            better, plain = found.get((model, name, "quire")), found.get((model, simple, "quire"))
            if plain is not None and better is not None:
                sizes = _pair(better["bytes"], plain["bytes"], MIB, ".2f")
                kl = _pair(better["kl"], plain["kl"], 1, ".5f")
                lines.append(f"\n{model}, {name} beside {simple}: KL {kl}, MiB {sizes}")
    return lines


def _pair(ours: float, theirs: float, unit: int, form: str) -> str:
    ratio = f"{ours / theirs:.2f}" if theirs else "-"
    return f"{ours / unit:{form}} / {theirs / unit:{form}} = {ratio}"


def main() -> None:
    """Measure, print a line for each row, write JSON as soon as a row is there."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="pydoc")
    parser.add_argument("--method", choices=METHODS, nargs="+", help="all that are measured on the model")
    parser.add_argument("--tool", choices=["quire", *TOOLS], nargs="+", default=["quire", *TOOLS])
    parser.add_argument("--rows", type=int, default=256, help="rows of calibration text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--spill", action="store_true", help="ours keeps the text between layers on the disk")
    parser.add_argument("--texts", type=int, default=0, help="held-out modules that are scored, 0 = all")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "compressors.json")
    parser.add_argument("--table", action="store_true", help="print what --output holds as Markdown, measure nothing")
    args = parser.parse_args()
    kept = Kept(args.output)
    if not args.table:
        args.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            bench = Bench(args.work, args.rows, args.length, Path(folder), args.spill)
            if args.model == "smollm2":
                source = smollm2.float32_folder(args.work)
                told = {"texts": smollm2.strings(source), "model": args.model, "source": source, "text": "general"}
                bench = replace(bench, **told)
            bench.texts = dict(list(bench.texts.items())[: args.texts or None])
            for method in args.method or MODELS[args.model]:
                for tool in (t for t in ("quire", *METHODS[method].tools) if t in args.tool):
                    row = bench.measured(method, tool)
                    kept.add(row)
                    print(shown(row), flush=True)
    print("\n".join(table(kept.rows)))


if __name__ == "__main__":
    main()
