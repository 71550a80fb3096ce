"""The loop: Adam, a rate that rises and falls, a state on disk from which a run goes on as if it had not stopped."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.files import becoming

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


class Shuffled(Generic[T]):
    """An endless order of `rows`, each pass of which is shuffled anew; a place in it has the same row in every run."""

    def __init__(self, rows: Sequence[T], seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __getitem__(self, place: int) -> T:
        """Row number `place`."""
        turn, at = divmod(place, len(self._rows))
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(self._seed * 7919 + turn))
        return self._rows[int(order[at])]


SAVE_SECONDS = 60.0
WARM_UP = 20
BETAS, DECAY = (0.9, 0.95), 0.01
MOMENTS = ("exp_avg", "exp_avg_sq")


class Learner(Protocol):
    """What learns."""

    def parameters(self) -> Mapping[str, Tensor]:
        """The leaves that change, by name; always the same."""
        ...

    def backward(self, step: int) -> float:
        """Add the gradients of step number `step`, from 0, and return its loss. The step alone decides what is read."""
        ...


@dataclass(frozen=True)
class LearningSchedule:
    """`steps` in all, `rate` of Adam at its highest, gradients cut to a norm of `clip`."""

    steps: int
    rate: float
    clip: float = 1.0

    def at(self, step: int) -> float:
        """The rate of a step: a short rise, then half a cosine to a tenth."""
        rise = min(1.0, (step + 1) / WARM_UP)
        return self.rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


class TrainingRun:
    """A learner on its way. `plan`: what a run is; one that goes on must be of the same.

    `state`: the file that is kept now and then. `paged`: Adam's moments are in a file beside it, which the system pages
    in and out (as QLoRA's paged optimizer does, Dettmers et al. 2023): memory for them is not needed all at once.
    """

    def __init__(
        self, learner: Learner, pace: LearningSchedule, plan: DataclassInstance, state: Path, paged: bool = False
    ) -> None:
        self.learner, self.pace = learner, pace
        self.step, self.losses = 0, list[float]()
        self._parameters, self._plan, self._state = dict(learner.parameters()), asdict(plan), state
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()), lr=pace.rate, betas=BETAS, weight_decay=DECAY
        )
        if paged:
            self._page_moments(state.with_suffix(".moments"))

    def go(self, tell: Callable[[int, float], None]) -> None:
        """All steps that are left; `tell(step, loss)` after each. State is kept now and then, and if it is stopped.

        But not of a run whose loss is no number any more: it goes on from the state before.
        """
        saved = time.monotonic()
        try:
            while self.step < self.pace.steps:
                tell(self.step + 1, self._one())
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        except ConfigError:
            raise
        except BaseException:
            self.save()
            raise
        self.save()

    def _one(self) -> float:
        """A step; its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.pace.at(self.step)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.learner.backward(self.step)
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss is {loss} at step {self.step + 1}: text or checkpoint give no numbers, or the rate is high"
            )
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.pace.clip)
        self._optimizer.step()
        self.step += 1
        self.losses.append(loss)
        return loss

    def save(self) -> None:
        """Weights, moments and step; the file is whole or not there."""
        tensors = {f"weight.{name}": p.detach() for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            for kind, value in self._optimizer.state.get(p, {}).items():
                tensors[f"{kind}.{name}"] = torch.as_tensor(value)
        about = {"plan": json.dumps(self._plan), "step": str(self.step), "losses": json.dumps(self.losses)}
        write_whole(self._state, {name: t.contiguous() for name, t in tensors.items()}, about)

    def resume(self) -> bool:
        """Go on where a run of the same plan stopped; False where there was none. `ConfigError` for another's."""
        if not self._state.is_file():
            return False
        with safe_open(self._state, framework="pt") as file:
            about = file.metadata() or {}
            if json.loads(about.get("plan", "null")) != json.loads(json.dumps(self._plan)):
                raise ConfigError(
                    f"{self._state} is of a run with other options ({about.get('plan')}); give these, or another folder"
                )
            for name in file.keys():  # noqa: SIM118
                kind, _, of = name.partition(".")
                self._put(kind, self._parameters[of], file.get_tensor(name))
        self.step, self.losses = int(about["step"]), json.loads(about["losses"])
        return True

    def _put(self, kind: str, parameter: Tensor, value: Tensor) -> None:
        state: dict[str, Any] = self._optimizer.state[parameter]
        if kind == "weight":
            parameter.data.copy_(value)
        elif kind in MOMENTS and kind in state:
            state[kind].copy_(value)
        else:
            state[kind] = value

    def _page_moments(self, path: Path) -> None:
        total = sum(p.numel() for p in self._parameters.values())
        pages, at = mapped(path, len(MOMENTS) * total), 0
        for p in self._parameters.values():
            state: dict[str, Any] = {"step": torch.zeros(())}
            for kind in MOMENTS:
                state[kind] = pages[at : at + p.numel()].view_as(p)
                at += p.numel()
            self._optimizer.state[p] = state


def unnamed(path: Path, size: int) -> int:
    """The descriptor of a file of `size` zeros that is made at `path` and has no name afterwards: who has it closes it.

    `ConfigError` where the disk has no room for them: without it the first write to one would end the process.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError:
            os.close(file)
            raise
        finally:
            path.unlink()
    return file


def mapped(path: Path, count: int) -> Tensor:
    """`count` zeros, f32, in a file as `unnamed` makes it, which is there as long as they are."""
    file = unnamed(path, 4 * count)
    try:
        return torch.frombuffer(mmap.mmap(file, 4 * count), dtype=torch.float32)
    finally:
        os.close(file)


def write_whole(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """A safetensors file that is whole or not there; `ConfigError` where it cannot be written."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with becoming(path) as part:
            save_file(tensors, part, about)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Says in one line why `path` cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written: {error}; make room there, or give another folder") from None
