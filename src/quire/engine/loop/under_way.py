"""The steps that were launched and whose results are not known: on one device, or in the stages of a pipeline."""

from __future__ import annotations

import time
from collections import deque

from quire.run.runner import Runner, Underway
from quire.sched.scheduler import Scheduler
from quire.speculate.speculator import Speculator


class UnderWay:
    """They end in the order in which they began.

    On a GPU the next one is planned and its forward pass sent before the wait for the first; it is sampled when that
    one is known, because the edits of its logits are made from all tokens. Of stages, the first goes on to other
    sequences, and to further chunks of prompts, before it waits for what the last makes of the first of them.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, speculator: Speculator | None, most: int, staged: bool
    ) -> None:
        """`most` steps at one time; `staged`: in several stages."""
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._most, self._staged = most, staged
        self._steps = deque[Underway]()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self) -> float:
        """Have as many as can be, one at least; returns the seconds that drafting took."""
        drafting = 0.0
        while not self._steps or (len(self._steps) < self._most and self._may_go_ahead()):
            if self._speculator is not None and (self._staged or not self._steps):
                begin = time.perf_counter()
                self._speculator.draft()
                drafting += time.perf_counter() - begin
            step = self._runner.forward(self._scheduler.plan())
            if self._steps and not step.plan.chunks:
                break
            if not self._staged and not self._steps:
                self._runner.sample(step)
            self._steps.append(step)
        return drafting

    def take(self) -> Underway:
        """The first, sampled."""
        step = self._steps.popleft()
        return step if step.sampled else self._runner.sample(step)

    def committed(self) -> None:
        """What was taken is known to the scheduler: draw what its followers on one device give."""
        if self._steps and not self._staged:
            self._runner.sample(self._steps[0])

    def _may_go_ahead(self) -> bool:
        """Whether to launch another step before the first is known; a draft by a model begins with its last token."""
        if any(map(self._runner.alone, self._steps)):
            return False
        drafts = self._speculator
        expects = drafts is not None and drafts.likely and (drafts.proposer.passes or not self._staged)
        return not expects and self._scheduler.may_plan_ahead()
