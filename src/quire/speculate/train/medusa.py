"""Medusa heads in training (Cai et al. 2024, "Medusa-1": the model is frozen)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softmax

from quire.model.net.hidden_taps import Taps
from quire.speculate.train.target import Target, divergence

DECAY = 0.8
"""Weight of a head's loss beside that of the one before it, as in the paper."""


class MedusaHeads(nn.Module):
    """`heads` heads of a residual block and a matrix to logits. They begin as the target's own head."""

    taps = Taps(every=True)

    def __init__(self, target: Target, heads: int) -> None:
        super().__init__()
        hidden, (_, own) = target.spec.hidden, target.matrices()
        self.blocks = nn.ParameterList([torch.zeros(hidden, hidden) for _ in range(heads)])
        self.biases = nn.ParameterList([torch.zeros(hidden) for _ in range(heads)])
        self.outs = nn.ParameterList([own.clone() for _ in range(heads)])

    def loss(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """hidden [n, hidden], logits [n, V] of the target's rows: head i at row t says what row t + 1 + i says."""
        wanted, total = softmax(logits, -1), torch.zeros(())
        for i, (block, bias, out) in enumerate(zip(self.blocks, self.biases, self.outs, strict=True)):
            x = hidden[: len(hidden) - 1 - i]
            total = total + DECAY**i * divergence((x + silu(x @ block.T + bias)) @ out.T, wanted[1 + i :])
        return total

    def layout(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors as the authors of Medusa publish them."""
        tensors: dict[str, Tensor] = {}
        for i, (block, bias, out) in enumerate(zip(self.blocks, self.biases, self.outs, strict=True)):
            tensors |= {f"{i}.0.linear.weight": block, f"{i}.0.linear.bias": bias, f"{i}.1.weight": out}
        vocab, hidden = self.outs[0].shape
        sizes = {"hidden_size": hidden, "vocab_size": vocab}
        return sizes | {"medusa_num_heads": len(self.outs), "medusa_num_layers": 1}, tensors
