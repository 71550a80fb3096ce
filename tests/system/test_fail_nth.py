"""T20: the n-th allocation, map, open, read or write fails while a model is loaded and answers: a clean error or the
right answer, whatever n is; never a crash, a hang or a file that misleads the next load.

Maps and allocations below a size are left alone: they are the interpreter's own, and CPython waits for ever for a
thread whose first frame finds no memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_answers import engine_of, run
from paths import SUPPORT
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.llm import LLM
from quire.ops.native import load_native

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
preloads = pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C compiler")
CLEAN = {"QuireError", "MemoryError"}
"""What a failure may be: the second only within a step, where an engine process says so and is started again."""


def swept(folder: Path, *sweeps: str) -> list[dict[str, Any]]:
    """The trials of fail_nth.py."""
    library, kept = folder / "fail_nth.so", folder / "kept"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([str(COMPILER), *flags, "-o", str(library), str(SUPPORT / "fail_nth.c")], check=True)
    more = {"LD_PRELOAD": str(library), "QUIRE_KEPT": str(kept), "PYTHONPATH": str(SUPPORT)}
    said = subprocess.run([sys.executable, str(SUPPORT / "fail_nth.py"), *sweeps], env=os.environ | more,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert said.returncode == 0, said.stderr[-3000:]
    return [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]


def check(trials: list[dict[str, Any]], kinds: set[str]) -> dict[str, int]:
    """How many trials of each kind ended with an error."""
    whole = next(trial["tokens"] for trial in trials if not trial["n"])
    failed = dict.fromkeys(kinds, 0)
    for trial in trials:
        what = {name: value for name, value in trial.items() if name != "after"}
        if "error" in trial:
            assert CLEAN & set(trial["kinds"]), what
            assert trial["error"] == "MemoryError" or len(trial["text"]) > 20, what
            failed[trial["kind"]] += 1
        else:
            assert trial.get("tokens") == whole, what
        assert trial.get("after", whole) == whole, f"the next load answers otherwise: {what}"
    assert {trial["kind"] for trial in trials if trial["n"]} == kinds
    return failed


@preloads
@pytest.mark.slow
def test_what_fails_is_told_and_misleads_nobody(tmp_path: Path) -> None:
    sweeps = ("alloc:65536:2:25", "map:1048577:1:1", "open:0:2:2", "read:0:2:4", "write:0:2:20")
    failed = check(swept(tmp_path, *sweeps), {sweep.partition(":")[0] for sweep in sweeps})
    assert failed["write"] == 0, "packed weights that cannot be kept are no reason to end"
    assert all(failed[kind] for kind in ("alloc", "map", "open", "read")), failed


@preloads
@pytest.mark.slow
@pytest.mark.parametrize("sweep", ["alloc:65536", "map:1048577", "open:0", "read:0", "write:0"])
def test_whatever_fails_is_told_and_misleads_nobody(sweep: str, tmp_path: Path) -> None:
    trials = swept(tmp_path, f"{sweep}:2000:1")
    failed = check(trials, {sweep.partition(":")[0]})
    print(f"\n{sweep}: {len(trials) - 1} points, errors {failed}")


def test_a_step_that_fails_anywhere_leaves_an_engine_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory in any op of any step of a call: the call ends with it, and the next gives what it gives alone."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    prompts = [tuple(range(9 + i, 60)) for i in range(3)]
    requests = [Request(id=f"r{i}", prompt=p, params=params, seed=0, arrival=0.0) for i, p in enumerate(prompts)]
    options: dict[str, Any] = {"enforce_eager": True, "num_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    want = [answer.tokens for answer in run(engine_of(**options), requests).values()]
    llm = LLM(device="cpu", **options)
    ops, left, calls = llm.engine.engine.ops, 0, 0  # type: ignore[attr-defined]

    def failing(fn: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal left, calls
            left, calls = left - 1, calls + 1
            if left == 0:
                raise MemoryError
            return fn(*args, **named)

        return call

    for name in ops.chosen:
        monkeypatch.setattr(ops, name, failing(getattr(ops, name)))

    def serve() -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in llm.generate([list(p) for p in prompts], params)]

    serve()
    whole, calls = calls, 0
    serve()
    again = calls
    for n in range(1, again, again // 12):
        left = n
        with pytest.raises(MemoryError):
            serve()
        llm.engine.engine.check()  # type: ignore[attr-defined]
        left = 0
        assert serve() == want, n
    assert whole > again > 40, "the second time its prompts' blocks are found"
