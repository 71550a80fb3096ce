"""A pipeline of a toy, run again and again in processes that are killed: at every write to the disk, and at random.

`python killed_work.py FOLDER`: each folder made in FOLDER is the end of one such history; one is undisturbed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.compress.tracking.journal import WorkFolder
from quire.core.errors import ConfigError

KEY = {"recipe": "r", "source": "s", "code": "c"}
STAGES, LAYERS = 2, 2
CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "truncate")


def pipeline(out: Path, slow: float = 0.0) -> None:
    """Each unit is made of the one before it; a stage needs the stage before."""
    with WorkFolder(out, KEY) as work:
        if work.finished:
            work.finish(lambda folder: None)
            return
        x = torch.arange(64.0)
        for stage in range(STAGES):
            for layer in range(LAYERS):
                if not work.done(stage, f"layer.{layer}"):
                    time.sleep(slow)
                    x = torch.sin(x * 1.7 + stage + layer)
                    work.save(stage, f"layer.{layer}", {"x": x, "half": x.to(torch.bfloat16)}, {"sum": float(x.sum())})
                x = work.tensors(stage, f"layer.{layer}").get("x", x)
            if stage:
                work.drop(stage - 1)
        sums = [work.facts(stage, f"layer.{layer}")["sum"] for stage in range(STAGES) for layer in range(LAYERS)]

        def write(folder: Path) -> None:
            save_file({"x": x, "sums": torch.tensor(sums, dtype=torch.float64)}, folder / "model.safetensors")

        work.finish(write)


def child(body: Callable[[], Any]) -> int:
    """Run `body` in a process of its own; the status that it ended with."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return pid


def dies_at(turn: int) -> None:
    """Kill this process before it makes the `turn`-th call that changes what is on the disk."""
    left = [turn]

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return guard

    for name in CALLS:
        setattr(os, name, guarded(getattr(os, name)))


def killed_at(turn: int, out: Path) -> None:
    """A run that dies at the `turn`-th such call, if there are as many."""
    dies_at(turn)
    pipeline(out)


def ended(pid: int) -> int:
    """Wait for a process: 0, or the signal that killed it; other ends are failures of the test."""
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def go_on(out: Path) -> None:
    """A run without a kill. One that was killed after all was done finds its own result."""
    try:
        pipeline(out)
    except ConfigError as error:
        assert "exists already" in str(error), error


def main(folder: Path) -> None:
    """All histories."""
    pipeline(folder / "undisturbed")
    turn = 0
    while True:
        out = folder / f"at-{turn}"
        if ended(child(partial(killed_at, turn, out))) == 0:
            break
        assert ended(child(partial(go_on, out))) == 0
        turn += 1
    draw = random.Random(1)
    for history in range(4):
        out, killed = folder / f"random-{history}", 0
        while killed < 5 and not out.exists():
            pid = child(partial(pipeline, out, 0.01))
            time.sleep(draw.uniform(0.0, 0.08))
            os.kill(pid, signal.SIGKILL)
            killed += ended(pid) == signal.SIGKILL
        assert ended(child(partial(go_on, out))) == 0
    print(turn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
