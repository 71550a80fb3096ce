"""What never ends fails: loops of tests are bounded in steps, and every test in time."""

from __future__ import annotations

import pytest

from fake_runner import FakeEngine, request
from quire.core.plan import StepPlan
from turns import reports, turns, working


class Stuck:
    """An engine whose steps say something for ever, and do nothing."""

    has_work = True

    def poll(self, timeout: float) -> object:
        """A report."""
        return self


def test_a_loop_that_never_ends_fails() -> None:
    assert list(turns(iter([1, 1, 0]).__next__)) == [0, 1]
    for loop in (turns(lambda: True, 9), working(Stuck(), 9), reports(Stuck(), 9)):  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="after 9 turns: no progress"):
            list(loop)


def test_a_scheduler_that_plans_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.submit(request("r", [1, 2], 3))
    monkeypatch.setattr(engine.scheduler, "plan", lambda: StepPlan())
    with pytest.raises(AssertionError):
        engine.drain()


def test_every_test_is_bounded_in_time(request: pytest.FixtureRequest) -> None:
    plugin = request.config.pluginmanager.getplugin("timeout")
    assert plugin is not None and float(request.config.getini("timeout")) <= 300
