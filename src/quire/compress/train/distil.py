"""Students that learn a teacher's distributions (Hinton et al. 2015), and its hidden states beside them.

The teacher is a net of the same vocabulary, or its likeliest tokens of every place, computed once and kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from quire.compress.net import Net
from quire.compress.train.objective import learned, of_text, weighted
from quire.compress.train.seen import SeenNet
from quire.compress.train.text import Batch, Row, batch_of
from quire.core.errors import ConfigError
from quire.training.loop import write_whole


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of log-probabilities [N, V], row by row; what p gives no probability counts nothing."""
    return F.kl_div(q, p, reduction="none", log_target=True).masked_fill(p == -torch.inf, 0.0).sum(-1)


def _js(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats (Lin 1991)."""
    middle = torch.logaddexp(student, teacher) - math.log(2)
    return (_kl(student, middle) + _kl(teacher, middle)) / 2


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda student, teacher: _kl(teacher, student),
    "reverse-kl": _kl,
    "js": _js,
}
"""Of log-probabilities [N, V] of student and teacher, nats [N]. Reverse KL: Gu et al. 2024 (MiniLLM)."""


@dataclass(frozen=True)
class Wanted:
    """What a teacher says at N places: log-probabilities [N, V], or [N, k] of the tokens `ids` [N, k] int64."""

    logs: Tensor
    ids: Tensor | None = None

    def divergence(self, logits: Tensor, kind: str, temperature: float) -> Tensor:
        """Of student logits [N, V] at `temperature` from what is wanted at it, [N] nats times temperature squared.

        The factor keeps gradients as large as those of text (Hinton et al. 2015). Where the teacher's likeliest tokens
        alone are known, all others count as one, in both; that is never more than the divergence of all.
        """
        student, teacher = (logits / temperature).log_softmax(-1), self.logs
        if self.ids is not None:
            student, teacher = _with_rest(student.gather(-1, self.ids)), _with_rest(teacher)
        return DIVERGENCES[kind](student, teacher) * temperature**2


def _with_rest(logs: Tensor) -> Tensor:
    """Log-probabilities [N, k] and that of everything else, [N, k + 1]."""
    known = torch.logsumexp(logs, -1, keepdim=True).clamp(
        max=-1e-7
    )  # a sum of 1 leaves a rest whose log has a gradient
    return torch.cat((logs, torch.log(-torch.expm1(known))), -1)


class Teacher(Protocol):
    """Who knows better."""

    def wanted(self, batch: Batch, temperature: float) -> tuple[Wanted, Mapping[int, Tensor]]:
        """What it says at the N places of `batch` that are learned, and its stream [N, h] past the layers it gives."""
        ...


class NetTeacher:
    """A net; `layers`: those past which its stream is given."""

    def __init__(self, net: SeenNet, layers: Sequence[int] = ()) -> None:
        self._net, self._layers = net, layers

    @torch.no_grad()
    def wanted(self, batch: Batch, temperature: float) -> tuple[Wanted, Mapping[int, Tensor]]:
        """As `Teacher`."""
        logits, hidden = self._net.run(batch.tokens, learned(batch), batch.lengths, wanted=self._layers)
        return Wanted((logits / temperature).log_softmax(-1)), hidden


@dataclass(frozen=True)
class Kept:
    """What is on disk: of which `teacher`, which rows (`digest`), the `top` likeliest tokens at `temperature`."""

    teacher: str
    digest: str
    top: int
    temperature: float


class KeptTeacher:
    """The likeliest tokens of a teacher at every place that is learned, from the folder that `keep` wrote."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        """`ConfigError` for a folder that is of other rows, or not whole."""
        try:
            self._about = Kept(**json.loads((folder / "kept.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: kept.json cannot be read ({error}); write it again") from None
        if self._about.digest != digest_of(rows):
            raise ConfigError(f"{folder}: is of other rows; give the same --data and --length, or another folder")
        self._folder = folder

    def wanted(self, batch: Batch, temperature: float) -> tuple[Wanted, Mapping[int, Tensor]]:
        """As `Teacher`; `ConfigError` for another temperature than was kept."""
        if temperature != self._about.temperature:
            raise ConfigError(f"{self._folder}: is of temperature {self._about.temperature}, not {temperature}")
        files = [load_file(self._folder / f"{row}.safetensors") for row in batch.rows]
        logs, ids = (torch.cat([file[name] for file in files]) for name in ("logs", "ids"))
        return Wanted(logs, ids.long()), {}


def keep(
    net: SeenNet, rows: Sequence[Row], folder: Path, top: int, temperature: float, tell: Callable[[int], None]
) -> None:
    """Write what `net` says of `rows` to `folder`, `top` tokens a place (8 bytes each), a file a row.

    Files that are there are left, so what stopped goes on; kept.json comes last. `tell(done)` after each row.
    """
    about = Kept(net.name, digest_of(rows), min(top, net.spec.vocab_size), temperature)
    begun = folder / "begun.json"
    if begun.is_file() and json.loads(begun.read_text(encoding="utf-8")) != vars(about):
        raise ConfigError(f"{folder}: was begun with another teacher, other rows or options; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(json.dumps(vars(about)), encoding="utf-8")
    teacher = NetTeacher(net)
    for number, row in enumerate(rows):
        path = folder / f"{number}.safetensors"
        if not path.is_file():
            said, _ = teacher.wanted(batch_of([(number, row)]), temperature)
            logs, ids = said.logs.topk(about.top, -1)
            write_whole(path, {"logs": logs.contiguous(), "ids": ids.int().contiguous()}, {})
        tell(number + 1)
    (folder / "kept.json").write_text(json.dumps(vars(about)), encoding="utf-8")


def digest_of(rows: Sequence[Row]) -> str:
    """Of tokens and of where learning begins in them."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(f"{row.start} {row.tokens}\n".encode())
    return found.hexdigest()


class Hidden:
    """The teacher's stream past some layers is learned too, through a matrix where widths differ (Romero et al. 2015).

    `pairs`: layer of the student -> layer of the teacher. `parameters`: the matrices [teacher's h, student's h], f32.
    """

    def __init__(self, student: Net, teacher: Net, seed: int) -> None:
        ours, theirs = student.spec, teacher.spec
        self.pairs = {i: round((i + 1) * theirs.layers / ours.layers) - 1 for i in range(ours.layers)}
        self.parameters: dict[str, Tensor] = {}
        made = torch.Generator().manual_seed(seed)
        if ours.hidden != theirs.hidden:
            for i in self.pairs:
                matrix = torch.randn(theirs.hidden, ours.hidden, generator=made) / math.sqrt(ours.hidden)
                self.parameters[f"projection.{i}"] = matrix.requires_grad_()

    def loss(self, ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor], batch: Batch) -> Tensor:
        """Of streams [N, h]: squares of what is missed beside that of the teacher's row, the mean over layers."""
        total = torch.zeros(())
        for i, j in self.pairs.items():
            x, wanted, matrix = ours[i], theirs[j], self.parameters.get(f"projection.{i}")
            missed = (x if matrix is None else x @ matrix.t()) - wanted
            total = total + weighted(missed.square().mean(-1) / wanted.square().mean(-1), batch)
        return total / len(self.pairs)


@dataclass(frozen=True)
class OfTeacher:
    """`share` of the divergence of `kind`, the rest of the text's loss; `hidden_weight` of hidden states'."""

    teacher: Teacher
    kind: str = "kl"
    temperature: float = 1.0
    share: float = 1.0
    hidden: Hidden | None = None
    hidden_weight: float = 0.0

    def loss(self, net: SeenNet, batch: Batch, checkpointing: bool) -> Tensor:
        """As `Objective`. `ConfigError` where the teacher has another vocabulary."""
        said, theirs = self.teacher.wanted(batch, self.temperature)
        layers = () if self.hidden is None else tuple(self.hidden.pairs)
        logits, ours = net.run(batch.tokens, learned(batch), batch.lengths, checkpointing, layers)
        if said.ids is None and said.logs.shape[-1] != logits.shape[-1]:
            raise ConfigError(
                f"--teacher: has {said.logs.shape[-1]} tokens, {net.name} {logits.shape[-1]}; they need one vocabulary"
            )
        divergence = said.divergence(logits, self.kind, self.temperature)
        total = self.share * weighted(divergence, batch)
        if self.share < 1:
            total = total + (1 - self.share) * of_text(logits, batch)
        if self.hidden is not None:
            total = total + self.hidden_weight * self.hidden.loss(ours, theirs, batch)
        return total
