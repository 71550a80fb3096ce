"""Chunks of prompts sized by time, so that tokens of others keep coming (Sarathi-Serve, Agrawal et al. 2024)."""

from __future__ import annotations

from quire.core.plan import StepPlan
from quire.sched.shares import LEAST, drew

RISE, FALL = 0.5, 0.1
"""How fast an estimate follows what was measured: a row that took longer must not happen twice."""
START = 0.002
"""Seconds that a row of a prompt takes, before any was measured."""


class Pace:
    """Learns how long decodes, and rows of prompts beside them, take. `target`: seconds of a step; 0: no limit."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._decodes, self._row = 0.0, START

    @property
    def limits(self) -> bool:
        """Whether there is a target."""
        return self._target > 0

    def budget(self, decodes: int, most: int) -> int:
        """Rows of a step that has so many of decodes, of `most` at most. Without decodes nobody waits for a token."""
        if not self._target or not decodes:
            return most
        rows = int(max(0.0, self._target - self._decodes) / self._row)
        return min(most, decodes + max(LEAST, rows))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step of `plan` took so long."""
        decodes = sum(chunk.count for chunk in plan.chunks if drew(chunk))
        prompts = plan.num_tokens - decodes
        if not self._target or not decodes:
            return
        if not prompts:
            self._decodes = _toward(self._decodes or seconds, seconds)
        elif self._decodes:
            self._row = _toward(self._row, max(0.0, seconds - self._decodes) / prompts)


def _toward(known: float, found: float) -> float:
    return known + (RISE if found > known else FALL) * (found - known)
