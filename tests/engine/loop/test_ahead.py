"""The engine one step ahead of its device: same tokens, whatever ends, fails, waits or is dropped meanwhile.

The device is one that pretends: it computes the definitions of all ops, as late as it may.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_gpu import FakeRuntime
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine import start as start_module
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.ops.arrays import Fetched
from quire.ops.op import REGISTRY
from quire.ops.reference.backend import ReferenceOps
from quire.ops.runtime import take_drawn
from quire.ops.sampling import SCORE, Found, Records, RowEdits
from quire.ops.triton.backend import GraphRecording
from quire.ops.triton.gpu import INTERPRETER, Gpu
from tiny_model import OPTIONS, write_tiny
from triton_ops import TRITON_OPS, needs_triton
from turns import turns

BROKEN = 200
"""A token whose embedding is NaN."""


class LateOps(ReferenceOps):
    """The definitions on a device that pretends; what a step calls beside its graph is queued."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.gpu, self.runtime = Gpu(torch.device("cpu"), INTERPRETER, True, runtime), runtime
        self.name, self.queues, self.pads = "triton", True, True  # to the rest it is a GPU
        for name in ("zero_blocks", "copy_blocks", "move_slots"):
            fn = getattr(self, name)
            setattr(self, name, lambda *args, fn=fn: runtime.queue(lambda: fn(*args)))
        self.now = {name: vars(self).pop(name) for name in ("penalize", "sample", "top_logprobs")}

    def record(self, fn: Callable[[], Any]) -> GraphRecording:
        """As a GPU does."""
        return GraphRecording(self.gpu, fn)

    def fetch(self, found: Sequence[Any]) -> Fetched:
        """As a GPU does."""
        return self.runtime.fetch([torch.as_tensor(each) for each in found])

    def penalize(self, logits: Tensor, edits: Sequence[RowEdits]) -> None:
        """Later, with the edits as they are now."""
        edits = copy.deepcopy(edits)
        self.runtime.queue(lambda: self.now["penalize"](logits, edits))

    def _later(self, name: str, outputs: list[Tensor], *args: Any) -> list[Tensor]:
        """Queue an op whose results are copied to `outputs`, which hold nonsense until then."""

        def work() -> None:
            for output, found in zip(outputs, self.now[name](*args), strict=True):
                output.copy_(torch.from_numpy(found if found.dtype.names is None else found.view(np.uint8)))

        self.runtime.queue(work)
        return outputs

    def sample(self, logits: Tensor, draws: Records) -> list[Tensor]:
        """Later."""
        outputs = [torch.full((len(draws),), 99, dtype=torch.int32) for _ in range(2)]
        return self._later("sample", outputs, logits, draws.copy())

    def top_logprobs(self, logits: Tensor, queries: Records, k: int, drawn: Found | None) -> list[Tensor]:
        """Later."""
        n = len(queries)
        scores = torch.full((n * SCORE.itemsize,), 99, dtype=torch.uint8)
        outputs = [scores, torch.full((n, k), 99, dtype=torch.int32), torch.full((n, k), 99.0)]
        return self._later("top_logprobs", outputs, logits, queries.copy(), k, drawn)


def test_unknown_tokens_are_looked_up_and_broken_ones_are_harmless() -> None:
    ids = torch.tensor([5, -1, -3, 0, -2], dtype=torch.int32)
    take_drawn(ids, torch.tensor([7, -1, 9], dtype=torch.int32))
    assert ids.tolist() == [5, 7, 9, 0, 0], "-1 would be read outside the embedding"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, eager: str = "", **options: Any) -> Engine:
    """An engine on a device that pretends or, where `eager` is empty, on the definitions."""
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 6, "block_size": 4, "device": "reference"}
    config = flat_config(**(OPTIONS | {"model": str(folder)} | limits | options))
    if eager:
        monkeypatch.setattr(start_module, "open_backend", lambda _: LateOps(FakeRuntime(eager)))
    engine = start_engine(config)
    monkeypatch.undo()
    engine.model.decoder.embed.table[BROKEN] = torch.nan  # type: ignore[attr-defined]
    return engine


EDITS = ({"presence_penalty": 1.5}, {"min_tokens": 3}, {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
         {"allowed_token_ids": [*range(4, 60)]}, {"logit_bias": {9: 5.0}})  # fmt: skip


def make_requests(count: int, seed: int, kinds: Collection[int] = (4,)) -> list[Request]:
    """Prompts with common beginnings; greedy and drawn, ended by tokens and by limits, edited, forked, broken."""
    rng = random.Random(seed)
    stems = [[rng.randrange(4, 190) for _ in range(20)] for _ in range(2)]
    requests = []
    for i in range(count):
        own = [rng.randrange(4, 190) for _ in range(rng.randint(1, 12))]
        prompt = rng.choice(stems)[: rng.choice((0, 8, 20))] + own + [BROKEN] * (i % 9 == 8)
        edited: dict[str, Any] = rng.choice(EDITS) if i % 5 in kinds else {}
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 12, 25)),
            temperature=float(i % 2),
            n=rng.choice((1, 1, 1, 3)),
            logprobs=2 if not edited and i % 3 else None,
            prompt_logprobs=1 if i % 7 == 3 else None,
            **edited,
        )
        ends = tuple(rng.sample(range(4, 190), 8))
        requests.append(
            Request(id=f"r{i}", prompt=tuple(prompt), params=params, seed=i, arrival=0.0, eos_token_ids=ends)
        )
    return requests


Answers = dict[tuple[str, int], list[Output]]


def run(
    engine: Engine, requests: list[Request], rng: random.Random, aborted: Sequence[str] = ()
) -> tuple[Answers, int]:
    """Outputs of all, and after how many steps the device had the next one; requests trickle in, some are aborted."""
    answers: Answers = {}
    waiting, drop, ahead = list(requests), list(aborted), 0
    for _ in turns(lambda: waiting or engine.has_work):
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            engine.submit(waiting.pop(0))
        if drop and (drop[0], 0) in answers:
            engine.abort(drop.pop(0))
        for out in engine.step():
            answers.setdefault((out.request_id, out.index), []).append(out)
        if engine.ops.queues and isinstance(engine.ops.runtime, FakeRuntime):
            ahead += len(engine.ops.runtime.main) > 1  # one: what was drawn is put aside behind the results
    assert engine.pool.num_used == 0
    return answers, ahead


def joined(outputs: list[Output]) -> tuple[Any, ...]:
    """What a sequence gave and how it ended."""
    tokens = [t for o in outputs for t in o.tokens]
    logprobs = [lp for o in outputs for lp in o.logprobs] + [lp for o in outputs for lp in o.prompt_logprobs or ()]
    numbers = [v for lp in logprobs for v in (lp.logprob, *(p for _, p in lp.top))]
    ids = [(lp.token, lp.rank, *(t for t, _ in lp.top)) for lp in logprobs]
    last = outputs[-1]
    return tokens, ids, last.finish_reason, last.stop_token, last.error, numbers


SHORT, ROOMY = {"num_blocks": 26}, {"num_blocks": 128}


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[Answers], int]:
    """What the definitions answer to the requests of each seed, and how many of their rows were broken."""
    with pytest.MonkeyPatch.context() as patch:
        plain = build(folder, patch, **ROOMY)
    answers = [run(plain, make_requests(27, seed), random.Random(seed))[0] for seed in range(3)]
    return answers, plain.runner.numeric_errors


@pytest.mark.parametrize(("room", "eager"), [
    pytest.param(SHORT, "side", id="short-side"),
    pytest.param(ROOMY, "main", id="roomy-main"),
    pytest.param(SHORT, "main", id="short-main", marks=pytest.mark.slow),
    pytest.param(ROOMY, "side", id="roomy-side", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_step_ahead_gives_the_same_answers(
    folder: Path,
    expected: tuple[list[Answers], int],
    monkeypatch: pytest.MonkeyPatch,
    room: dict[str, int],
    eager: str,
) -> None:
    late = build(folder, monkeypatch, eager, max_model_len=60, **room)
    broken = 0
    for seed, answers in enumerate(expected[0]):
        found, ahead = run(late, make_requests(27, seed), random.Random(seed + 50))
        assert found.keys() == answers.keys()
        for key, outputs in found.items():
            *mine, numbers = joined(outputs)
            *theirs, wanted = joined(answers[key])
            assert mine == theirs, key
            assert numbers == pytest.approx(wanted, abs=1e-4), key
        assert ahead > 10
        broken += sum(joined(outputs)[2] == "error" for outputs in found.values())
    assert broken >= 6
    assert expected[1] == late.runner.numeric_errors, "a row after an error is none"
    assert (late.scheduler.preemptions > 0) == (room is SHORT)
    assert late.prefix is not None and late.prefix.hits > 0


def test_edited_logits_are_planned_ahead_and_edited_from_all_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, late = build(folder, monkeypatch, **ROOMY), build(folder, monkeypatch, "side", **ROOMY)
    requests = make_requests(20, 11, kinds=range(5))
    assert all(r.edits_logits(0) for r in requests)
    expected, _ = run(plain, requests, random.Random(1))
    found, ahead = run(late, requests, random.Random(2))
    assert {key: joined(outputs)[:5] for key, outputs in found.items()} == {
        key: joined(outputs)[:5] for key, outputs in expected.items()
    }
    assert ahead > 20


def test_aborts_meanwhile_leave_the_others_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, late = build(folder, monkeypatch, **ROOMY), build(folder, monkeypatch, "side", **ROOMY)
    requests = make_requests(24, 7)
    aborted = [r.id for r in requests if (r.params.max_tokens or 0) > 5][:5]
    expected, _ = run(plain, requests, random.Random(1))
    found, _ = run(late, requests, random.Random(2), aborted)
    for key, outputs in found.items():
        mine, theirs = joined(outputs), joined(expected[key])
        if key[0] in aborted:
            assert mine[0] == theirs[0][: len(mine[0])]
        else:
            assert mine[:5] == theirs[:5]


def test_without_it_the_host_waits_for_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = build(folder, monkeypatch, "side", async_scheduling=False, **ROOMY)
    answers, ahead = run(late, make_requests(8, 3), random.Random(0))
    assert answers and ahead == 0


def test_the_option_is_refused_where_nothing_would_overlap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--async-scheduling: on the reference backend"):
        build(folder, monkeypatch, async_scheduling=True)
    assert not build(folder, monkeypatch, async_scheduling=False).ahead


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.slow
def test_bits_on_the_gpu_backend_are_those_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)
    requests = [r for r in make_requests(6, 5) if len(r.prompt) < 16]
    found = []
    for ahead in (True, False):
        small = {"device": "cuda", "ops": missing, "async_scheduling": ahead, "max_num_batched_tokens": 8}
        engine = build(folder, monkeypatch, **(ROOMY | small))
        assert engine.ahead == ahead
        answers, _ = run(engine, requests, random.Random(ahead))
        found.append({key: joined(outputs) for key, outputs in answers.items()})
    assert found[0] == found[1] and len(found[0]) >= 3
