"""Engines on a device that pretends, one step ahead, and the requests that run in them."""

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
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine import start as start_module
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.ops.arrays import Fetched, Host
from quire.ops.op import REGISTRY
from quire.ops.reference.backend import ReferenceOps
from quire.ops.sampling import SCORE, Found, Records, RowEdits
from quire.ops.triton.backend import GpuOps, GraphRecording
from quire.ops.triton.gpu import INTERPRETER, Gpu
from tiny_model import OPTIONS, write_tiny
from triton_ops import TRITON_OPS
from turns import turns

MISSING = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
"""Few graphs: each is run once per layer and op, as Python."""


def request(index: int, prompt: tuple[int, ...], logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=logprobs)
    return Request(id=f"r{index}", prompt=prompt, params=params, seed=0, arrival=0.0)


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

    def gather(self, parts: Sequence[Any], tail: Host) -> Callable[[], Host]:
        """As a GPU does: what a store is to have is copied behind the steps that are queued."""
        return GpuOps.gather(self, parts, tail)  # type: ignore[arg-type]

    def scatter(self, parts: Sequence[Any], data: Host) -> None:
        """As a GPU does: what comes back is put in place behind the steps that are queued."""
        GpuOps.scatter(self, parts, data)  # type: ignore[arg-type]

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
