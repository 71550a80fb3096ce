"""What a net is trained by: the text itself, a teacher's distributions, or both."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.train.seen import SeenNet
from quire.compress.train.text import UNREAD, Batch


class Objective(Protocol):
    """What gradients are made of."""

    def loss(self, net: SeenNet, batch: Batch, checkpointing: bool) -> Tensor:
        """Of a batch, a number with its graph."""
        ...


class OfText:
    """Cross entropy in nats of the tokens that follow, the mean over those that are learned, by their rows' weights."""

    def loss(self, net: SeenNet, batch: Batch, checkpointing: bool) -> Tensor:
        """As `Objective`."""
        return of_text(net.run(batch.tokens, learned(batch), batch.lengths, checkpointing)[0], batch)


def of_text(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of `OfText` from logits [N, V] of the places that are learned."""
    return weighted(F.cross_entropy(logits, batch.targets[learned(batch)], reduction="none"), batch)


def learned(batch: Batch) -> Tensor:
    """Places bool [T] whose target is one."""
    return batch.targets != UNREAD


def weighted(losses: Tensor, batch: Batch) -> Tensor:
    """The mean of `losses` [N] of the places that are learned by the weights of their rows."""
    weights = batch.weights[learned(batch)]
    return torch.dot(losses, weights) / weights.sum()
