"""The loop: rows of text in a fixed order, Adam, a state on disk from which a run goes on as if it had not stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.core.errors import ConfigError
from quire.speculate.train.target import Target

SAVE_SECONDS = 60.0
WARM_UP = 20
STATE = "training.safetensors"
"""Under `state/` of the folder that is written, where nothing looks for weights."""


@dataclass(frozen=True)
class Plan:
    """What a run is; one that goes on must be of the same. `heads`: tokens to guess; `batch`: rows of text a step, of
    `length` tokens; `rate`: of Adam at its highest."""

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
        """Of one row of text, from what `Target.read` gives; tokens [n] int64."""
        ...

    def layout(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of the public layout."""
        ...


class Run:
    """Heads in training on `rows` of text."""

    def __init__(self, plan: Plan, heads: nn.Module, target: Target, rows: list[list[int]], out: Path) -> None:
        self.plan, self.heads, self.target, self.rows, self.out = plan, heads, target, rows, out
        self._optimizer = torch.optim.AdamW(heads.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.step, self.losses = 0, list[float]()
        self._state = out / "state" / STATE

    def go(self, tell: Callable[[int, float], None]) -> None:
        """All steps that are left; `tell(step, loss)` after each. State is kept now and then, and if it is stopped."""
        assert hasattr(self.heads, "loss")
        saved = time.monotonic()
        try:
            while self.step < self.plan.steps:
                for group in self._optimizer.param_groups:
                    group["lr"] = self.plan.rate * self._factor()
                tell(self.step + 1, self._one())
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def _factor(self) -> float:
        """Of the rate: a short rise, then half a cosine to a tenth."""
        rise = min(1.0, (self.step + 1) / WARM_UP)
        return rise * (0.55 + 0.45 * math.cos(math.pi * self.step / self.plan.steps))

    def _one(self) -> float:
        """A step; its loss."""
        heads: Any = self.heads
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for j in range(self.plan.batch):
            tokens = self._row(self.step * self.plan.batch + j)
            loss = heads.loss(*self.target.read(tokens), torch.tensor(tokens)) / self.plan.batch
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise ConfigError(
                f"the loss is {total} at step {self.step + 1}: the target gives no numbers for a text of --data"
            )
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        self.losses.append(total)
        return total

    def _row(self, place: int) -> list[int]:
        """Row number `place` of an endless order, each pass of which is shuffled anew."""
        turn, at = divmod(place, len(self.rows))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.plan.seed * 7919 + turn))
        return self.rows[int(order[at])]

    def save(self) -> None:
        """Weights, moments and step; the file is whole or not there."""
        tensors = {f"weight.{name}": p.detach() for name, p in self.heads.named_parameters()}
        for name, p in self.heads.named_parameters():
            for kind, value in self._optimizer.state.get(p, {}).items():
                tensors[f"{kind}.{name}"] = torch.as_tensor(value)
        about = {"plan": json.dumps(asdict(self.plan)), "step": str(self.step), "losses": json.dumps(self.losses)}
        _write(self._state, {name: t.contiguous() for name, t in tensors.items()}, about)

    def resume(self) -> bool:
        """Go on where a run of the same plan stopped; False where there was none. `ConfigError` for another's."""
        if not self._state.is_file():
            return False
        with safe_open(self._state, framework="pt") as file:
            about = file.metadata() or {}
            if json.loads(about.get("plan", "null")) != asdict(self.plan):
                raise ConfigError(
                    f"{self._state} is of a run with other options ({about.get('plan')}); give these, or another folder"
                )
            parameters = dict(self.heads.named_parameters())
            for name in file.keys():  # noqa: SIM118
                kind, _, of = name.partition(".")
                value = file.get_tensor(name)
                if kind == "weight":
                    parameters[of].data.copy_(value)
                else:
                    self._optimizer.state[parameters[of]][kind] = value
        self.step, self.losses = int(about["step"]), json.loads(about["losses"])
        return True

    def write(self, dtype: torch.dtype) -> None:
        """The folder in its public layout: config.json and model.safetensors in `dtype`."""
        heads: Any = self.heads
        config, tensors = heads.layout()
        kept = {n: (t.detach().to(dtype) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
        _write(self.out / "model.safetensors", kept, {"format": "pt"})
        config |= {"base_model_name_or_path": self.target.model.name, "torch_dtype": str(dtype).removeprefix("torch.")}
        (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(tensors, str(part), about)
    part.replace(path)
