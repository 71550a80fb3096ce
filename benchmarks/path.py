"""The way of a token through the code: files and Python calls from `LLM.generate` to the native call.

    python benchmarks/path.py [MODEL]

Prints the files of quire that a request passes, in the order in which they are first entered, and the Python calls of a
step that decodes one sequence (median over the steps of an answer), by file.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import quire
from quire import LLM, SamplingParams
from quire.engine.engine import Engine

ROOT = Path(quire.__file__).parent
TOKENS = 40


class Watch:
    """Counts calls of Python functions: of all, the files; of steps, how many each has."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.steps: list[Counter[str]] = []
        self.within = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As of `sys.setprofile`."""
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)):
            name = str(Path(path).relative_to(ROOT))
            self.files[name] = self.files.get(name, 0) + 1
        else:
            name = "elsewhere"
        if self.within:
            self.steps[-1][name] += 1


def main(model: str) -> None:
    """Watch one answer, after one that was not watched."""
    llm, watch, step = LLM(model, device="cpu"), Watch(), Engine.step
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    watch.steps.append(Counter())

    def stepped(self: Engine, *args: Any, **named: Any) -> Any:
        watch.steps.append(Counter())
        watch.within = True
        try:
            return step(self, *args, **named)
        finally:
            watch.within = False

    llm.generate("def f(x):", params)
    Engine.step = stepped  # type: ignore[method-assign]
    sys.setprofile(watch)
    llm.generate("def g(y):", params)
    sys.setprofile(None)
    totals = [sum(each.values()) for each in watch.steps[2:-1]]
    print(f"{len(watch.files)} files, {statistics.median(totals):.0f} Python calls a step of one sequence")
    print("files:", ", ".join(watch.files))
    middle = watch.steps[len(watch.steps) // 2]
    print("calls:", ", ".join(f"{name} {count}" for name, count in middle.most_common()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
