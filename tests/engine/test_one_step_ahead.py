"""The engine one step ahead of its device: same tokens, whatever ends, fails, waits or is dropped meanwhile.

The device is one that pretends: it computes the definitions of all ops, as late as it may.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from queueing_engine import ROOMY, SHORT, Answers, build, joined, make_requests, run
from queueing_engine import folder as folder
from quire.core.errors import ConfigError
from quire.ops.op import REGISTRY
from quire.ops.runtime import take_drawn
from triton_ops import TRITON_OPS, needs_triton


def test_unknown_tokens_are_looked_up_and_broken_ones_are_harmless() -> None:
    ids = torch.tensor([5, -1, -3, 0, -2], dtype=torch.int32)
    take_drawn(ids, torch.tensor([7, -1, 9], dtype=torch.int32))
    assert ids.tolist() == [5, 7, 9, 0, 0], "-1 would be read outside the embedding"


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
