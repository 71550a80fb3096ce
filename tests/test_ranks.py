"""Ranks: what they exchange over shared memory, engines of several processes beside one, and a rank that dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from group import each
from oracle import BACKENDS, backend
from quire.core.config import flat_config
from quire.core.errors import ConfigError, EngineFailure
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.parallel.shared import MESSAGE, SLOT, SharedComm, comm_bytes, shared_memory
from quire.run.builder import StepSizes
from quire.run.multi_rank import MultiRankExecutor
from quire.run.rank_group import Ranks

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PYDOC = str(Path(__file__).parent.parent / "src/quire/assets/pydoc")


def parts(world: int, rows: int, width: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows * width)
    return [torch.randn(rows, width, generator=g) for _ in range(world)]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 70), (1, SLOT // 4 + 5), (40, 8192)])
def test_sums_are_in_the_order_of_ranks(world: int, rows: int, width: int) -> None:
    own, ops = parts(world, rows, width), backend("reference")
    want = own[0].clone()
    for part in own[1:]:
        want += part
    for found in each(world, lambda comm: comm.all_reduce(ops, own[comm.rank].clone())):
        assert torch.equal(found, want)


@pytest.mark.parametrize("widths", [(3, 3), (5, 0, 7), (SLOT // 4 + 3, 2)])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_columns_lie_beside_each_other(widths: tuple[int, ...], rows: int) -> None:
    own, ops = [parts(1, rows, width)[0] for width in widths], backend("reference")
    for found in each(len(widths), lambda comm: comm.gather_columns(ops, own[comm.rank], widths)):
        assert torch.equal(found, torch.cat(own, 1))


def test_collectives_may_follow_each_other_at_once() -> None:
    ops = backend("reference")

    def work(comm: SharedComm) -> float:
        total = 0.0
        for i in range(500):
            total += float(comm.all_reduce(ops, torch.full((1, 1 + i % 7), float(comm.rank + i)))[0, -1])
        return total

    assert each(3, work, crowded=False) == [sum(3.0 * i + 3 for i in range(500))] * 3


def test_messages_of_any_length_are_heard_in_order() -> None:
    said = [b"x", b"", bytes(range(256)) * (MESSAGE // 100), b"last"]

    def work(comm: SharedComm) -> list[bytes]:
        if comm.rank == 0:
            for message in said:
                comm.tell(message)
            return said
        heard = [comm.hear(60_000) or b"" for _ in said]
        assert comm.hear(1) is None
        return heard

    assert each(3, work) == [said] * 3


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    file, ops = shared_memory(comm_bytes(2)), backend("reference")
    first, second = (SharedComm(file, rank, 2, crowded=True) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_reduce, ops, torch.ones(1, 4))
        second.leave()
        with pytest.raises(ValueError, match="a rank of the group has ended"):
            waiting.result(timeout=30)
    os.close(file)


@contextmanager
def engine_of(world: int, **options: Any) -> Iterator[Engine]:
    engine = start_engine(
        flat_config(model=PYDOC, dtype="float32", max_model_len=256, tensor_parallel_size=world, **options)
    )
    with closing(engine):
        yield engine


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1}, {"temperature": 0.9, "n": 3, "logprobs": 0},
    {"temperature": 0.7, "presence_penalty": 0.5}, {"temperature": 0.0, "prompt_logprobs": 1},
]  # fmt: skip


def run(engine: Engine, step: Callable[[], object] = lambda: None) -> dict[tuple[str, int], list[int]]:
    """Tokens of four requests, two of which begin alike."""
    for i, params in enumerate(PARAMS):
        prompt = (*range(20, 60), *range(100 * i, 100 * i + 9 * i))
        engine.submit(
            Request(id=str(i), prompt=prompt, params=SamplingParams(max_tokens=20, **params), seed=i, arrival=0)
        )
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        step()
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault((output.request_id, output.index), []).extend(output.tokens)
    return found


FORMS: dict[str, dict[str, Any]] = {
    "few blocks": {"num_blocks": 20, "max_num_seqs": 4},
    "looked up": {"speculative_config": '{"method": "ngram", "adaptive": false}'},
    "a draft model": {"speculative_config": f'{{"method": "draft_model", "model": "{PYDOC}", "adaptive": false}}'},
    "every op by itself": {"enforce_eager": True, "max_num_batched_tokens": 70},
}


@pytest.mark.parametrize("form", ["few blocks", *(pytest.param(form, marks=pytest.mark.slow) for form in [*FORMS][1:])])
def test_two_ranks_say_what_one_says(form: str) -> None:
    with engine_of(1) as one:
        want = run(one)
    with engine_of(2, **FORMS[form]) as two:
        assert run(two) == want and run(two) == want


def test_what_ranks_cannot_do_is_said() -> None:
    for options, why in (
        (
            {"speculative_model": PYDOC, "speculative_draft_tensor_parallel_size": 3},
            "it may be 1 or 2: a draft",
        ),
        ({"speculative_config": '{"method": "self", "layers": 1, "draft_tensor_parallel_size": 1}'}, "it may be 2"),
        ({"speculative_config": '{"method": "ngram", "draft_tensor_parallel_size": 2}'}, "nothing of these drafts"),
        ({"tensor_parallel_size": 65}, "must lie in"),
    ):
        with pytest.raises(ConfigError, match=why):
            flat_config(**({"model": PYDOC, "tensor_parallel_size": 2} | options))


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_rank_that_dies_ends_the_engine_which_ends_the_others(waited_for: bool) -> None:
    with engine_of(2, device="cpu") as engine:
        assert isinstance(engine.executor, MultiRankExecutor)
        others = engine.executor.ranks.others

        def kill() -> None:
            if waited_for:
                os.kill(others[0].pid, signal.SIGSTOP)
            later.start()

        later = threading.Timer(0.5 if waited_for else 0.0, os.kill, (others[0].pid, signal.SIGKILL))

        with pytest.raises(ValueError, match="a rank of the group has ended"):
            run(engine, lambda: None if later.ident else kill())
    assert all(other.ended() is not None for other in others)


def test_a_rank_that_computes_on_other_arrays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Ranks.compare

    def compare(self: Ranks, shape: StepSizes, arrays: bytes) -> None:
        plain(self, shape, arrays[:-1] + bytes([arrays[-1] ^ 1]) if shape.tokens < 9 else arrays)

    with engine_of(2) as engine:
        monkeypatch.setattr(Ranks, "compare", compare)
        with pytest.raises(EngineFailure, match=r"step \d+: ranks \[1\] differ from rank 0"):
            run(engine)
