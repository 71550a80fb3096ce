"""What a net is trained by: the text itself, a teacher's distributions, or both."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.train.seen import ParametrizedNet
from quire.compress.train.text import IGNORE_INDEX, TrainingBatch


class Objective(Protocol):
    """What gradients are made of."""

    def loss(self, net: ParametrizedNet, batch: TrainingBatch, checkpointing: bool) -> Tensor:
        """Of a batch, a number with its graph."""
        ...


class CrossEntropy:
    """Cross entropy in nats of the tokens that follow, the mean over those that are learned, by their rows' weights."""

    def loss(self, net: ParametrizedNet, batch: TrainingBatch, checkpointing: bool) -> Tensor:
        """As `Objective`."""
        return cross_entropy(net.run(batch.tokens, target_mask(batch), batch.lengths, checkpointing)[0], batch)


def cross_entropy(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """The loss of `CrossEntropy` from logits [N, V] of the places that are learned."""
    return weighted_mean(F.cross_entropy(logits, batch.targets[target_mask(batch)], reduction="none"), batch)


def target_mask(batch: TrainingBatch) -> Tensor:
    """Places bool [T] whose target is one."""
    return batch.targets != IGNORE_INDEX


def weighted_mean(losses: Tensor, batch: TrainingBatch) -> Tensor:
    """The mean of `losses` [N] of the places that are learned by the weights of their rows."""
    weights = batch.weights[target_mask(batch)]
    return torch.dot(losses, weights) / weights.sum()
