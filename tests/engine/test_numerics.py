"""T19: a number that is none, in the output of any op of a step, costs the request whose row it is and nobody else.

A trial serves a few requests beside each other and ruins one row of what one op gives. Each request then either gives
what it gives alone or ends with a `NumericError`: a token that differs would be a fault that was laundered. One value
passes by definition: a logit of -inf excludes its token (`ops.sampling`). Later trials find the prefixes that earlier
ones published. `QUIRE_NUMERICS_TRIALS` sets how many trials the slow run makes (1,000 unless told).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine_answers import FORMATS, Answer, engine_of
from quire.core.dtypes import is_float
from quire.core.params import SamplingParams
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.local import LocalEngine
from quire.ops.native import load_native
from quire.run.runner import LaunchedStep
from turns import reports

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
TRIALS = int(os.environ.get("QUIRE_NUMERICS_TRIALS", "1000"))
LIMITS = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_blocks": 64, "enforce_eager": True}
BESIDE = ("penalize", "sample", "top_logprobs", "copy_blocks", "zero_blocks", "move_slots")
"""Ops that give no rows of numbers."""


class Fault:
    """Between the decoder and its ops: ruins one row of the output of one call, when it is `aim`ed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plan = StepPlan()
        self.rng, self.value = random.Random(), 0.0
        self.step, self.call, self.calls = -1, -1, 0
        self.op, self.hit = "", ""
        forward = engine.runner.forward

        def watched(plan: StepPlan) -> LaunchedStep:
            self.plan, self.calls = plan, 0
            self.step -= 1
            return forward(plan)

        engine.runner.forward = watched  # type: ignore[method-assign]
        for name in engine.ops.chosen:
            if name not in BESIDE:
                setattr(engine.ops, name, self._around(name, getattr(engine.ops, name)))

    def aim(self, rng: random.Random, value: float) -> None:
        """Ruin a row of the output of some call of a step soon."""
        self.rng, self.value, self.op, self.hit = rng, value, "", ""
        self.step, self.call = rng.randint(1, 8), rng.randrange(self.most)

    most = 60
    """Calls of a step of the embedded model, at least as many as there are."""

    def _around(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            found = fn(*args, **named)
            if self.step == 0 and self.calls == self.call:
                self._ruin(name, found[-1] if isinstance(found, tuple) else found)
            self.calls += 1
            return found

        return call

    def _ruin(self, name: str, rows: np.ndarray) -> None:
        owners = [chunk.seq.request.id for chunk in self.plan.chunks for _ in range(chunk.count)]
        if len(rows) != len(owners):
            owners = [chunk.seq.request.id for chunk in self.plan.chunks for _ in range(chunk.logits)]
        excludes = self.value == -math.inf and rows.shape[-1] == self.engine.model.spec.vocab_size
        if len(rows) == len(owners) and rows.dtype == np.float32 and len(rows) and not excludes:
            row = self.rng.randrange(len(rows))
            width = rows[row].size
            at = slice(None) if self.rng.random() < 0.3 else self.rng.randrange(width)
            rows[row].reshape(-1)[at] = self.value
            self.op, self.hit = name, owners[row]


def asked() -> list[Request]:
    """Two that share a prefix, one of many rows, a short one; greedy, drawn, scored, edited."""
    rng = random.Random(19)
    stem = [rng.randrange(8, 6000) for _ in range(40)]
    ways: list[tuple[list[int], dict[str, Any]]] = [
        ([*stem, 9], {"temperature": 0.0, "logprobs": 1}),
        ([*stem, 11, 12], {"temperature": 0.9, "logprobs": 0}),
        ([rng.randrange(8, 6000) for _ in range(60)], {"temperature": 0.0, "prompt_logprobs": 0}),
        ([7, 8, 9], {"temperature": 0.7, "repetition_penalty": 1.2}),
    ]
    return [
        Request(id=f"r{i}", prompt=tuple(prompt), seed=i, arrival=0.0,
                params=SamplingParams(max_tokens=6, ignore_eos=True, **way))
        for i, (prompt, way) in enumerate(ways)
    ]  # fmt: skip


def serve(engine: LocalEngine, requests: list[Request]) -> dict[str, Answer]:
    """What each gives; its `reason` is the kind of its error where it failed. Nothing may follow an end."""
    found = {request.id: Answer([], []) for request in requests}
    for request in requests:
        engine.submit(request)
    for report in reports(engine, 500):
        for out in report.outputs:
            answer = found[out.request_id]
            assert answer.reason is None, "an output after the end"
            answer.tokens += out.tokens
            answer.logprobs += [*(out.prompt_logprobs or ()), *out.logprobs]
            answer.reason = out.error_kind or out.finish_reason
    engine.engine.check()
    return found


def published_are_finite(engine: Engine) -> None:
    """Keys and values that requests may find hold no NaN and no infinity."""
    blocks = list(engine.pool._by_key.values())
    for cache in engine.runner.caches.own:
        for tensor in (cache.keys, cache.values):
            if blocks and is_float(tensor.dtype) and tensor.dtype.itemsize > 1:
                assert bool(np.isfinite(tensor[blocks].astype(np.float32)).all()), (
                    "a published block holds what is no number"
                )


def trials(fmt: str, count: int, values: tuple[float, ...]) -> tuple[dict[str, int], list[str]]:
    """Faults that were noticed, by op; what went wrong."""
    want = {r.id: serve(engine_of(**(LIMITS | FORMATS[fmt])), [r])[r.id] for r in asked()}
    engine = engine_of(**(LIMITS | FORMATS[fmt]))
    fault, rng = Fault(engine.engine), random.Random(fmt)
    noticed: dict[str, int] = {}
    wrong: list[str] = []
    for trial in range(count):
        requests = [replace(r, id=f"{trial}-{r.id}", cache_salt=str(trial // 8)) for r in asked()]
        fault.aim(rng, values[trial % len(values)])
        what = ""
        for name, got in serve(engine, requests).items():
            alone = want[name.partition("-")[2]]
            same = got.bits() == alone.bits() and got.reason == alone.reason
            failed = got.reason == "NumericError" and got.tokens == alone.tokens[: len(got.tokens)]
            if failed and name == fault.hit:
                noticed[fault.op] = noticed.get(fault.op, 0) + 1
            elif not same:
                what += f" {name} {got.reason}"
        if what:
            wrong.append(f"{fault.value} by {fault.op} in {fault.hit}:{what}")
        published_are_finite(engine.engine)
    return noticed, wrong


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_a_row_that_is_no_number_is_noticed_and_harms_nobody(fmt: str) -> None:
    noticed, wrong = trials(fmt, 21, (math.nan, math.inf, -math.inf))
    assert not wrong, "\n".join(wrong)
    assert sum(noticed.values()) > 6 and len(noticed) > 2, noticed


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "float32", "isa": "portable"}], ids=str)
def test_what_free_blocks_hold_changes_no_bit(options: dict[str, Any]) -> None:
    """Nobody wipes the blocks of a request that leaves before its numbers are proved: kernels read no further than
    the tokens there are."""
    found = []
    for dirty in (False, True):
        engine = engine_of(**(LIMITS | options))
        for cache in engine.engine.runner.caches.own if dirty else ():
            for tensor in (cache.keys, cache.values):
                tensor.view(np.uint8)[:] = 0xFF  # NaN in every float format
        found.append({name: answer.bits() for name, answer in serve(engine, asked()).items()})
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_that_are_no_numbers_many_times(fmt: str) -> None:
    noticed, wrong = trials(fmt, TRIALS, (math.nan, math.inf, -math.inf))
    print(f"\n{fmt}: {TRIALS} trials, noticed {noticed}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:40])
