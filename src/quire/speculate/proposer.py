"""Who guesses tokens ahead: the one interface of all methods."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Protocol

from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence


class Proposer(Protocol):
    """Writes `Sequence.draft.tokens`. Output never depends on what it says, only how many tokens a step gives.

    `passes`: a draft of n tokens takes n passes of a model over the batch; otherwise it is free. `at_once`: it takes
    one pass, in which each sequence has a row more than tokens. `longest`: drafted tokens lie before that position.
    `weight_bytes`: memory of its own weights. `seconds`: what the passes of the last `propose` took.
    """

    passes: bool
    at_once: bool
    longest: int
    weight_bytes: int
    seconds: float

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """Set `draft` of each of `seqs` to at most as many tokens as `limits` says, for positions len(tokens) on.

        Their blocks are writable as far as that, and all their tokens but the last are computed.
        """
        ...

    def ready(self, seq: Sequence) -> bool:
        """Whether there is what a draft of `seq` begins with."""
        ...

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """A step was launched: its copies are made, its keys and values are there.

        `follow`: drafts of its sequences are likely to come. `results`: of its chunks, not committed yet, while its
        hidden rows are there; otherwise none.
        """
        ...
