"""What heads are to say: the target's distributions, which carry more than the text's tokens (Hinton et al. 2015)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import log_softmax


def divergence(said: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy of logits `said` [n, V] and probabilities `wanted` [n, V], the mean over rows."""
    return -(wanted * log_softmax(said, -1)).sum(-1).mean()
