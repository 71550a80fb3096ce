"""The loop that all training runs in: on a problem whose answer is known."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.training.loop import WARM_UP, LearningSchedule, Shuffled, TrainingRun, mapped
from training_runs import Plan


class Line:
    """Learns y = 3 x - 1 from a few points a step."""

    def __init__(self) -> None:
        self.slope, self.offset = torch.zeros((), requires_grad=True), torch.zeros((1,), requires_grad=True)

    def parameters(self) -> Mapping[str, Tensor]:
        """Both."""
        return {"slope": self.slope, "offset": self.offset}

    def backward(self, step: int) -> float:
        """Squares of what is missed."""
        x = torch.randn(16, generator=torch.Generator().manual_seed(step))
        loss = (self.slope * x + self.offset - (3 * x - 1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def learned(path: Path, paged: bool, steps: int = 400) -> TrainingRun:
    return TrainingRun(Line(), LearningSchedule(steps, 0.1), Plan(steps), path / "state.safetensors", paged)


@pytest.mark.parametrize("paged", [False, True])
def test_it_learns_and_goes_on_as_if_it_had_not_stopped(paged: bool, tmp_path: Path) -> None:
    whole = learned(tmp_path / "a", paged)
    whole.go(lambda step, loss: None)
    found = {name: value.detach() for name, value in whole.learner.parameters().items()}
    assert abs(float(found["slope"]) - 3) < 0.02 and abs(float(found["offset"]) + 1) < 0.02

    def stop(step: int, loss: float) -> None:
        if step == 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned(tmp_path / "b", paged).go(stop)
    rest = learned(tmp_path / "b", not paged)
    assert rest.resume() and rest.step == 150
    rest.go(lambda step, loss: None)
    assert rest.losses == whole.losses
    for name, value in rest.learner.parameters().items():
        assert torch.equal(value.detach(), found[name])
    with pytest.raises(ConfigError, match="of a run with other options"):
        learned(tmp_path / "b", paged, steps=7).resume()


def test_the_rate_rises_and_falls() -> None:
    pace = LearningSchedule(1000, 2.0)
    rates = [pace.at(step) for step in range(1000)]
    assert rates.index(max(rates)) == WARM_UP - 1 and max(rates) == pytest.approx(2.0, rel=1e-2)
    assert rates[-1] == pytest.approx(0.2, rel=1e-2)


def test_what_has_no_numbers_stops_it(tmp_path: Path) -> None:
    run = learned(tmp_path, False)
    with torch.no_grad():
        run.learner.parameters()["slope"].fill_(float("nan"))
    with pytest.raises(ConfigError, match="the loss is nan at step 1"):
        run.go(lambda step, loss: None)
    assert not learned(tmp_path, False).resume(), "nothing goes on from weights that are none"


def test_a_full_disk_leaves_the_state_before(tmp_path: Path) -> None:
    run, soft, hard = learned(tmp_path, False), *resource.getrlimit(resource.RLIMIT_FSIZE)
    run.save()
    state = (tmp_path / "state.safetensors").read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
        with pytest.raises(
            ConfigError, match=r"state\.safetensors cannot be written: .*; make room there, or give another"
        ):
            run.save()
        with pytest.raises(ConfigError, match=r"state\.moments cannot be written: .*; make room there"):
            learned(tmp_path, True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "state.safetensors").read_bytes() == state
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_every_pass_reads_all_rows_in_an_order_of_its_own() -> None:
    rows = [[i] for i in range(10)]
    order = Shuffled(rows, 3)
    first, second = [order[i] for i in range(10)], [order[i] for i in range(10, 20)]
    assert sorted(first) == sorted(second) == rows and first != second
    assert [Shuffled(rows, 3)[i] for i in range(20)] == first + second


def test_moments_that_do_not_fit_on_the_disk_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: .*; make room there"):
        mapped(tmp_path / "x", 1 << 50)
    assert not list(tmp_path.iterdir())
    pages = mapped(tmp_path / "y", 10)
    pages += 1
    assert pages.sum() == 10 and not list(tmp_path.iterdir())
