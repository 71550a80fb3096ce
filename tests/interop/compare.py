"""Files as real tools write them and as they read ours, beside what the tools themselves answer: `make interop`.

Each tool gets an environment of its own (`quire.bench.suite.environments`), makes tiny quantized models there and says
their logits and greedy tokens (`make_*.py`), activations unrounded; here they are read in float32 and compared. What
quire writes (`written.py`) is read by the tools (`read_*.py`), and their answers are compared with ours in the same
way. A tool that cannot be installed, or a case that it cannot make, is a line that says why. The exit code is 1 when an
answer differs, or a tool cannot read what we wrote.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

from written import CASES, write_cases  # noqa: E402

from oracle import BACKENDS, backend, relative_error  # noqa: E402
from paged_model import Paged  # noqa: E402
from quire.bench.suite.environments import RECIPES, environment  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import QuireError  # noqa: E402
from quire.model.build import Model, load_model  # noqa: E402

TOOLS = {script.stem.removeprefix("make_"): script for script in sorted(HERE.glob("make_*.py"))}
assert set(CASES) <= set(TOOLS)
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


def results(tool: str, out: Path, ours: bool = False) -> Iterator[tuple[str, bool, str]]:
    """(case, whether it is right, how) of everything that the tool made, or was to read."""
    for failed in sorted(out.glob("*.failed")):
        yield failed.stem, not ours, f"{tool} does not {'read' if ours else 'make'} it here: {failed.read_text()}"
    for answers in sorted(out.glob("*.answers.safetensors")):
        case = answers.name.removesuffix(".answers.safetensors")
        yield case, *compared(out / case, load_file(answers))


def answered(tool: str, work: Path, ours: bool) -> Path | str:
    """The folder of what the tool made, or read of what we wrote, which is done once; or why it was not."""
    out = (work / ("written" if ours else "made") / tool).absolute()
    if (out / "ready").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        env = environment(work, tool)
    except SystemExit as error:
        return f"not installable: {error}"
    if ours:
        write_cases(tool, out)
    script = HERE / f"read_{tool}.py" if ours else TOOLS[tool]
    with (out / "log").open("w") as log:
        command, variables = [env.python, str(script), str(out)], os.environ | env.variables
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
        for ours in (False, True):
            out = answered(tool, options.work, ours)
            if isinstance(out, str):
                wrong += ours
                print(f"{tool}: {out}", flush=True)
                break
            for case, good, how in results(tool, out / "cases" if ours else out, ours):
                wrong += not good
                print(f"{tool:14} {'reads ' * ours + case:24} {'' if good else 'WRONG: '}{how}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
