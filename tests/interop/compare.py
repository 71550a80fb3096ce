"""Files as real tools write them, beside what the tools themselves answer: `make interop`.

Each tool gets an environment of its own (`benchmarks/environments.py`), makes tiny quantized models there and says
their logits and greedy tokens (`make_*.py`), activations unrounded; here they are read in float32 and compared. A tool
that cannot be installed, or a case that it cannot make, is a line that says why. The exit code is 1 when an answer
differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from environments import RECIPES, environment  # noqa: E402

from oracle import BACKENDS, backend, relative_error  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import QuireError  # noqa: E402
from quire.model.build import Model, load_model  # noqa: E402
from test_model import Paged  # noqa: E402

TOOLS = {script.stem.removeprefix("make_"): script for script in sorted(HERE.glob("make_*.py"))}
NEAR = 1e-3
"""Largest error of logits, relative to the largest."""


def greedy(model: Model, tokens: list[int], steps: int) -> list[int]:
    """The best tokens after `tokens`, all of them computed anew for each."""
    made: list[int] = []
    for _ in range(steps):
        text = tokens + made
        made.append(int(Paged(model, [text]).run([[len(text)]])[0][-1].argmax()))
    return made


def compared(folder: Path, answers: dict[str, torch.Tensor]) -> tuple[bool, str]:
    """Whether our answers are the tool's, and in words how near."""
    try:
        model = load_model(flat_config(model=str(folder), dtype="float32", activations="int16"), backend(BACKENDS[-1]))
    except QuireError as error:
        return False, f"refused: {error.message}"
    errors, same, total = list[float](), 0, 0
    for tokens, logits, made in zip(answers["tokens"].tolist(), answers["logits"], answers["made"], strict=True):
        errors.append(relative_error(Paged(model, [tokens]).run([[len(tokens)]])[0], logits))
        ours = greedy(model, tokens, len(made))
        same, total = same + sum(a == b for a, b in zip(ours, made.tolist(), strict=True)), total + len(made)
    good = max(errors) <= NEAR and same == total
    return good, f"logits within {max(errors):.1e}, {same} of {total} tokens ({model.quantization})"


def results(tool: str, out: Path) -> Iterator[tuple[str, bool, str]]:
    """(case, whether it is right, how) of everything that the tool made."""
    for failed in sorted(out.glob("*.failed")):
        yield failed.stem, True, f"{tool} does not make it here: {failed.read_text()}"
    for answers in sorted(out.glob("*.answers.safetensors")):
        case = answers.name.removesuffix(".answers.safetensors")
        yield case, *compared(out / case, load_file(answers))


def made(tool: str, work: Path) -> Path | str:
    """The folder of what the tool made, which it makes once, or why it did not."""
    out = (work / "made" / tool).absolute()
    if (out / "ready").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    try:
        env = environment(work, tool)
    except SystemExit as error:
        return f"not installable: {error}"
    with (out / "log").open("w") as log:
        command, variables = [env.python, str(TOOLS[tool]), str(out)], os.environ | env.variables
        code = subprocess.run(command, cwd=out, env=variables, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        return f"ends with code {code}: {' '.join((out / 'log').read_text().split()[-30:])}"
    (out / "ready").touch()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=[*TOOLS], help=f"of {', '.join(TOOLS)}; all by default")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".venv" / "interop", help="where environments and files are"
    )
    options = parser.parse_args()
    wrong = 0
    for tool in options.tools:
        assert tool in TOOLS and tool in RECIPES, f"{tool!r} is none of {', '.join(TOOLS)}"
        out = made(tool, options.work)
        if isinstance(out, str):
            print(f"{tool}: {out}", flush=True)
            continue
        for case, good, how in results(tool, out):
            wrong += not good
            print(f"{tool:14} {case:24} {'' if good else 'WRONG: '}{how}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
