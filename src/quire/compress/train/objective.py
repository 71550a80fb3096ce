"""Training objectives, and a net as the training loop sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.train.dataset import IGNORE_INDEX, TrainingBatch, TrainingRow, collate
from quire.compress.train.parametrized import ParametrizedNet
from quire.training.loop import Shuffled


class Objective(Protocol):
    """A function of a batch whose gradients are learned from."""

    def loss(self, net: ParametrizedNet, batch: TrainingBatch, checkpointing: bool) -> Tensor:
        """Compute the loss of a batch, a number with its graph."""
        ...


class CrossEntropy:
    """Cross entropy in nats of the tokens that follow, the mean over those that are learned, by their rows' weights."""

    def loss(self, net: ParametrizedNet, batch: TrainingBatch, checkpointing: bool) -> Tensor:
        """Compute the loss of a batch; see `Objective`."""
        return cross_entropy(net.run(batch.tokens, target_mask(batch), batch.lengths, checkpointing)[0], batch)


def cross_entropy(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """Compute the loss of `CrossEntropy` from logits [N, V] of the places that are learned."""
    return weighted_mean(F.cross_entropy(logits, batch.targets[target_mask(batch)], reduction="none"), batch)


def target_mask(batch: TrainingBatch) -> Tensor:
    """Return the places bool [T] that have a target."""
    return batch.targets != IGNORE_INDEX


def weighted_mean(losses: Tensor, batch: TrainingBatch) -> Tensor:
    """Compute the mean of `losses` [N] of the places that are learned by the weights of their rows."""
    weights = batch.weights[target_mask(batch)]
    return torch.dot(losses, weights) / weights.sum()


class NetLearner:
    """A net as the training loop sees it. `parameters`: leaves by name; `rows`: read `batch` a step, in an order of
    `seed`."""

    def __init__(
        self,
        net: ParametrizedNet,
        parameters: Mapping[str, Tensor],
        objective: Objective,
        rows: Sequence[TrainingRow],
        batch: int,
        seed: int,
        checkpointing: bool = False,
    ) -> None:
        self._net, self._parameters, self._objective = net, dict(parameters), objective
        self._rows, self._batch, self._checkpointing = Shuffled(list(enumerate(rows)), seed), batch, checkpointing

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the leaves, by name."""
        return self._parameters

    def backward(self, step: int) -> float:
        """Compute gradients of the step's rows, and return their loss."""
        batch = collate([self._rows[step * self._batch + i] for i in range(self._batch)])
        loss = self._objective.loss(self._net, batch, self._checkpointing)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
