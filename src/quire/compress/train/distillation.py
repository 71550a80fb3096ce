"""Distillation: students learn a teacher's distributions (Hinton et al. 2015), hidden states, or the text it writes.

The teacher is a net of the same vocabulary, or its likeliest tokens of every place, computed once and cached on disk.
Text that a teacher writes may have its reasons (Hsieh et al. 2023, Distilling step-by-step): the rationale is asked for
first (Kojima et al. 2022), then the answer that follows from it; a student learns each as a task of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from quire.compress.checkpoint.net import Net
from quire.compress.train.dataset import TrainingBatch, TrainingRow, collate
from quire.compress.train.objective import cross_entropy, target_mask, weighted_mean
from quire.compress.train.parametrized import ParametrizedNet
from quire.core.errors import BadRequest, ConfigError
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
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
class TeacherOutput:
    """Probabilities of a teacher at N places: logs [N, V], or [N, k] of the tokens `ids` [N, k] int64."""

    logs: Tensor
    ids: Tensor | None = None

    def divergence(self, logits: Tensor, kind: str, temperature: float) -> Tensor:
        """Compute the divergence of student logits [N, V] at `temperature` from the teacher's, [N] nats times
        temperature squared.

        The factor keeps gradients as large as those of text (Hinton et al. 2015). Where the teacher's likeliest tokens
        alone are known, all others count as one, in both; that is never more than the divergence of all.
        """
        student, teacher = (logits / temperature).log_softmax(-1), self.logs
        if self.ids is not None:
            student, teacher = _with_rest(student.gather(-1, self.ids)), _with_rest(teacher)
        return DIVERGENCES[kind](student, teacher) * temperature**2


def _with_rest(logs: Tensor) -> Tensor:
    """Append to log-probabilities [N, k] that of everything else, [N, k + 1]."""
    known = torch.logsumexp(logs, -1, keepdim=True).clamp(
        max=-1e-7
    )  # a sum of 1 leaves a rest whose log has a gradient
    return torch.cat((logs, torch.log(-torch.expm1(known))), -1)


class Teacher(Protocol):
    """A teacher: a net, or what was cached of one."""

    def predict(self, batch: TrainingBatch, temperature: float) -> tuple[TeacherOutput, Mapping[int, Tensor]]:
        """Return probabilities at the N places of `batch` that are learned, and hidden states [N, h] past the layers it
        gives."""
        ...


class NetTeacher:
    """A teacher that is a net; `layers`: those past which its hidden states are given."""

    def __init__(self, net: ParametrizedNet, layers: Sequence[int] = ()) -> None:
        self._net, self._layers = net, layers

    @torch.no_grad()
    def predict(self, batch: TrainingBatch, temperature: float) -> tuple[TeacherOutput, Mapping[int, Tensor]]:
        """Run the net; see `Teacher.predict`."""
        logits, hidden = self._net.run(batch.tokens, target_mask(batch), batch.lengths, wanted=self._layers)
        return TeacherOutput((logits / temperature).log_softmax(-1)), hidden


@dataclass(frozen=True)
class CachedTeacherInfo:
    """A description of what is on disk: which `teacher`, which rows (`digest`), the `top` likeliest tokens at
    `temperature`."""

    teacher: str
    digest: str
    top: int
    temperature: float


class CachedTeacher:
    """A teacher's likeliest tokens at every place that is learned, from the folder that `cache_teacher` wrote."""

    def __init__(self, folder: Path, rows: Sequence[TrainingRow]) -> None:
        """Open the folder. `ConfigError` where it is of other rows, or not whole."""
        try:
            self._about = CachedTeacherInfo(**json.loads((folder / "kept.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: kept.json cannot be read ({error}); write it again") from None
        if self._about.digest != rows_digest(rows):
            raise ConfigError(f"{folder}: is of other rows; give the same --data and --length, or another folder")
        self._folder = folder

    def predict(self, batch: TrainingBatch, temperature: float) -> tuple[TeacherOutput, Mapping[int, Tensor]]:
        """Read the rows of the batch, see `Teacher.predict`; `ConfigError` for another temperature than was cached."""
        if temperature != self._about.temperature:
            raise ConfigError(f"{self._folder}: is of temperature {self._about.temperature}, not {temperature}")
        files = [load_file(self._folder / f"{row}.safetensors") for row in batch.rows]
        logs, ids = (torch.cat([file[name] for file in files]) for name in ("logs", "ids"))
        return TeacherOutput(logs, ids.long()), {}


def cache_teacher(
    net: ParametrizedNet,
    rows: Sequence[TrainingRow],
    folder: Path,
    top: int,
    temperature: float,
    report: Callable[[int], None],
) -> None:
    """Write the probabilities of `net` for `rows` to `folder`, `top` tokens a place (8 bytes each), a file a row.

    Files that are there are left, so what stopped goes on; kept.json comes last. `report(done)` after each row.
    """
    about = CachedTeacherInfo(net.name, rows_digest(rows), min(top, net.spec.vocab_size), temperature)
    begun = folder / "begun.json"
    if begun.is_file() and json.loads(begun.read_text(encoding="utf-8")) != vars(about):
        raise ConfigError(f"{folder}: was begun with another teacher, other rows or options; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(json.dumps(vars(about)), encoding="utf-8")
    teacher = NetTeacher(net)
    for number, row in enumerate(rows):
        path = folder / f"{number}.safetensors"
        if not path.is_file():
            said, _ = teacher.predict(collate([(number, row)]), temperature)
            logs, ids = said.logs.topk(about.top, -1)
            write_whole(path, {"logs": logs.contiguous(), "ids": ids.int().contiguous()}, {})
        report(number + 1)
    (folder / "kept.json").write_text(json.dumps(vars(about)), encoding="utf-8")


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Compute the digest of tokens and of where learning begins in them."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(f"{row.start} {row.tokens}\n".encode())
    return found.hexdigest()


class HiddenStateLoss:
    """A loss of hidden states past some layers, through a matrix where widths differ (Romero et al. 2015).

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

    def loss(self, ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor], batch: TrainingBatch) -> Tensor:
        """Compute the mean over layers of squared differences of hidden states [N, h], relative to the teacher's
        squares."""
        total = torch.zeros(())
        for i, j in self.pairs.items():
            x, wanted, matrix = ours[i], theirs[j], self.parameters.get(f"projection.{i}")
            missed = (x if matrix is None else x @ matrix.t()) - wanted
            total = total + weighted_mean(missed.square().mean(-1) / wanted.square().mean(-1), batch)
        return total / len(self.pairs)


@dataclass(frozen=True)
class DistillationLoss:
    """An objective: `share` of the divergence of `kind`, the rest of the text's loss, `hidden_weight` of hidden
    states'."""

    teacher: Teacher
    kind: str = "kl"
    temperature: float = 1.0
    share: float = 1.0
    hidden: HiddenStateLoss | None = None
    hidden_weight: float = 0.0

    def loss(self, net: ParametrizedNet, batch: TrainingBatch, checkpointing: bool) -> Tensor:
        """Compute the loss of a batch, see `Objective`. `ConfigError` where the teacher has another vocabulary."""
        said, theirs = self.teacher.predict(batch, self.temperature)
        layers = () if self.hidden is None else tuple(self.hidden.pairs)
        logits, ours = net.run(batch.tokens, target_mask(batch), batch.lengths, checkpointing, layers)
        if said.ids is None and said.logs.shape[-1] != logits.shape[-1]:
            raise ConfigError(
                f"--teacher: has {said.logs.shape[-1]} tokens, {net.name} {logits.shape[-1]}; they need one vocabulary"
            )
        divergence = said.divergence(logits, self.kind, self.temperature)
        total = self.share * weighted_mean(divergence, batch)
        if self.share < 1:
            total = total + (1 - self.share) * cross_entropy(logits, batch)
        if self.hidden is not None:
            total = total + self.hidden_weight * self.hidden.loss(ours, theirs, batch)
        return total


REASONING_PROMPT = "Let's think step by step."
ANSWER_PROMPT = "Therefore, the answer alone is:"
PROMPTS_AT_ONCE = 64
"""Prompts whose answers are written together: what is lost when it is stopped."""


def write_answers(
    llm: LLM,
    prompts: Sequence[str],
    out: Path,
    params: SamplingParams,
    rationales: bool,
    report: Callable[[int], None],
) -> None:
    """Write a line of JSON for each of `prompts` to `out`: prompt, completion and, with `rationales`, rationale.

    The chat template is used where the model has one. What stopped goes on after the lines that are there; `out` gets
    its name when it is whole. `report(done)` now and then. `ConfigError` where lines are of other prompts or options.
    """
    part = out.with_suffix(".part")
    done = _lines(part, prompts, rationales)
    report(len(done))
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8") as file:
        file.writelines(done)
        for at in range(len(done), len(prompts), PROMPTS_AT_ONCE):
            asked = prompts[at : at + PROMPTS_AT_ONCE]
            for entry in _answers(llm, asked, params, rationales):
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            report(at + len(asked))
    part.replace(out)


def _lines(part: Path, prompts: Sequence[str], rationales: bool) -> list[str]:
    """Read the whole lines of a file that was begun."""
    if not part.is_file():
        return []
    lines = [line for line in part.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    for number, line in enumerate(lines):
        entry = json.loads(line)
        if number >= len(prompts) or entry["prompt"] != prompts[number] or ("rationale" in entry) != rationales:
            raise ConfigError(f"{part}: line {number + 1} is of other prompts or options; remove it, or give another")
    return lines


def _answers(llm: LLM, prompts: Sequence[str], params: SamplingParams, rationales: bool) -> list[dict[str, str]]:
    if not rationales:
        found = _generate(llm, [[prompt] for prompt in prompts], params)
        return [{"prompt": p, "completion": text} for p, text in zip(prompts, found, strict=True)]
    reasons = _generate(llm, [[f"{prompt}\n{REASONING_PROMPT}"] for prompt in prompts], params)
    turns = [
        [f"{prompt}\n{REASONING_PROMPT}", reason, ANSWER_PROMPT]
        for prompt, reason in zip(prompts, reasons, strict=True)
    ]
    return [
        {"prompt": p, "completion": text, "rationale": reason}
        for p, text, reason in zip(prompts, _generate(llm, turns, params), reasons, strict=True)
    ]


def _generate(llm: LLM, turns: Sequence[Sequence[str]], params: SamplingParams) -> list[str]:
    """Generate what follows on each: turns of a user and the model by turns, or text after text where there is no
    template."""
    try:
        template = llm.chat_template
    except BadRequest:
        template = None
    asked: list[Any] = []
    for each in turns:
        if template is None:
            asked.append("\n".join(each) + "\n")
        else:
            chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(each)]
            asked.append({"prompt_token_ids": template.encode(chat)})
    return [output.outputs[0].text.strip() for output in llm.generate(asked, params, use_tqdm=False)]
