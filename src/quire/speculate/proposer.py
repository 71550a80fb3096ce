"""Who guesses tokens ahead: the one interface of all methods."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from quire.core.plan import StepPlan
from quire.core.sequence import Sequence


class Proposer(Protocol):
    """Writes `Sequence.draft`. Output never depends on what it says, only how many tokens a step gives.

    `passes`: a draft of n tokens takes n passes of a model over the batch; otherwise it is free. `longest`: drafted
    tokens lie before that position. `weight_bytes`: memory of its own weights.
    """

    passes: bool
    longest: int
    weight_bytes: int

    def propose(self, seqs: Rows[Sequence], limits: Rows[int]) -> None:
        """Set `draft` of each of `seqs` to at most as many tokens as `limits` says, for positions len(tokens) on.

        Their blocks are writable as far as that, and all their tokens but the last are computed.
        """
        ...

    def computed(self, plan: StepPlan, follow: bool) -> None:
        """A step was launched: its copies are made, its keys and values are there.

        `follow`: drafts of its sequences are likely to come.
        """
        ...
