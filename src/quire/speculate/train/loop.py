"""Heads that learn from what a frozen target makes of rows of text, and the folder that they become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.speculate.train.target import Target
from quire.training import loop
from quire.training.loop import Shuffled

STATE = "training.safetensors"
"""Under `state/` of the folder that is written, where nothing looks for weights."""


@dataclass(frozen=True)
class HeadTraining:
    """What a run is. `heads`: tokens to guess; `batch`: rows of text a step, of `length` tokens; `rate`: of Adam at its
    highest."""

    method: str
    heads: int
    steps: int
    batch: int
    length: int
    rate: float
    seed: int


class Trained(Protocol):
    """Heads that learn."""

    def loss(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Loss of one row of text, from what `Target.read` gives; tokens [n] int64."""
        ...

    def layout(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of the public layout."""
        ...


class HeadLearner:
    """Heads, as the loop sees them."""

    def __init__(self, plan: HeadTraining, heads: nn.Module, target: Target, rows: list[list[int]]) -> None:
        assert hasattr(heads, "loss")
        self._batch, self._heads, self._target, self._rows = plan.batch, heads, target, Shuffled(rows, plan.seed)

    def parameters(self) -> Mapping[str, Tensor]:
        """The module's."""
        return dict(self._heads.named_parameters())

    def backward(self, step: int) -> float:
        """Compute gradients of one row after the other."""
        heads: Any = self._heads
        total = 0.0
        for j in range(self._batch):
            tokens = self._rows[step * self._batch + j]
            loss = heads.loss(*self._target.read(tokens), torch.tensor(tokens)) / self._batch
            loss.backward()
            total += float(loss.detach())
        return total


class HeadTrainingRun(loop.TrainingRun):
    """Heads in training on `rows` of text, which are written to `out`."""

    def __init__(self, plan: HeadTraining, heads: nn.Module, target: Target, rows: list[list[int]], out: Path) -> None:
        learner = HeadLearner(plan, heads, target, rows)
        super().__init__(learner, loop.LearningSchedule(plan.steps, plan.rate), plan, out / "state" / STATE)
        self.plan, self.heads, self.target, self._out = plan, heads, target, out

    def write(self, dtype: torch.dtype) -> None:
        """The folder in its public layout: config.json and model.safetensors in `dtype`."""
        heads: Any = self.heads
        config, tensors = heads.layout()
        kept = {n: (t.detach().to(dtype) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
        loop.write_whole(self._out / "model.safetensors", kept, {"format": "pt"})
        config |= {"base_model_name_or_path": self.target.model.name, "torch_dtype": str(dtype).removeprefix("torch.")}
        (self._out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
