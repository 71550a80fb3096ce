"""A net, as the loop of all training sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quire.compress.train.objective import Objective
from quire.compress.train.seen import SeenNet
from quire.compress.train.text import Row, batch_of
from quire.training.data_order import Shuffled


class NetLearner:
    """`parameters`: the leaves, by name; `rows`: read `batch` a step, in an order that `seed` gives."""

    def __init__(
        self,
        net: SeenNet,
        parameters: Mapping[str, Tensor],
        objective: Objective,
        rows: Sequence[Row],
        batch: int,
        seed: int,
        checkpointing: bool = False,
    ) -> None:
        self._net, self._parameters, self._objective = net, dict(parameters), objective
        self._rows, self._batch, self._checkpointing = Shuffled(list(enumerate(rows)), seed), batch, checkpointing

    def parameters(self) -> Mapping[str, Tensor]:
        """The leaves, by name."""
        return self._parameters

    def backward(self, step: int) -> float:
        """Gradients of the step's rows, and their loss."""
        batch = batch_of([self._rows[step * self._batch + i] for i in range(self._batch)])
        loss = self._objective.loss(self._net, batch, self._checkpointing)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
