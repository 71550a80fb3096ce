"""Training jobs from their options: what is read, the parameters and the objective, and the folder that is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.compress.checkpoint.dequantized import as_plain_checkpoint
from quire.compress.checkpoint.net import Net, checkpoint_dtype
from quire.compress.checkpoint.writer import atomic_folder, write_folder
from quire.compress.tracking.journal import JOURNAL, work_folder
from quire.compress.train.dataset import TextDataset, TrainingRow
from quire.compress.train.distillation import (
    CachedTeacher,
    DistillationLoss,
    HiddenStateLoss,
    NetTeacher,
    Teacher,
    cache_teacher,
    rows_digest,
    write_answers,
)
from quire.compress.train.lora_training import LoRA, merge_adapter, quantize_base, target_modules
from quire.compress.train.objective import CrossEntropy, NetLearner, Objective
from quire.compress.train.options import TrainOptions
from quire.compress.train.parametrized import ParametrizedNet, PruningMasks, trainable_tensors
from quire.compress.train.qat import fake_quantize
from quire.compress.train.student import write_random_student, write_truncated_student
from quire.core.dtypes import F8, I8
from quire.core.errors import ConfigError
from quire.core.files import sampled_digest
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.model.describe import open_model
from quire.model.disk.checkpoint import resolve
from quire.quant.registry import QUANTIZERS
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.training.loop import LearningSchedule, TrainingRun

RESULT_NEUTRAL = ("paged", "checkpointing")
"""Options that change no number, so that a run may go on with others."""
SCHEMES = {"4": "int4", "8": "int8", "fp8": "fp8"}
CACHES = {"auto": None, "int8": I8, "fp8": F8}
ProgressCallback = Callable[[str, int, int], None]
"""(what is done, how much of it, of how much)"""


@dataclass(frozen=True)
class TrainingPlan:
    """Facts of a run; one that goes on must be of the same."""

    options: Mapping[str, Any]
    model: str
    teacher: str
    rows: str


@dataclass(frozen=True)
class TrainingJob:
    """A training run, and what is written of it once it is done. `notes`: what a user should know of it beforehand."""

    run: TrainingRun
    net: ParametrizedNet
    adapter: LoRA | None
    notes: tuple[str, ...]
    model: str
    out: Path

    def write(self) -> None:
        """Write the adapter, or the model, and remove the work folder."""
        if self.adapter is None:
            write_folder(self.out, self.net.tensors, self.net.config, self.net.folder, checkpoint_dtype(self.net))
        else:
            with atomic_folder(self.out) as folder:
                self.adapter.write(folder, self.model)
        shutil.rmtree(work_folder(self.out), ignore_errors=True)


def _cache_path(work: Path, what: str, model: str, *facts: object) -> Path:
    """Return where what is made of `model` and `facts` is cached, so that what others made is not taken for it."""
    found = hashlib.blake2b(f"{sampled_digest(resolve(model))} {facts}".encode(), digest_size=8)
    return work / f"{what}-{found.hexdigest()}"


def write_merged(model: str, adapter: Path, out: Path) -> None:
    """Write `model` with the PEFT adapter in the folder `adapter` merged in, to `out`."""
    net = Net(as_plain_checkpoint(open_model(model)), torch.float32)
    merge_adapter(net, adapter)
    write_folder(out, net.tensors, net.config, net.folder, checkpoint_dtype(net))


def prepare(model: str, out: Path, options: TrainOptions, report: ProgressCallback) -> TrainingJob:
    """Make the job of training `model` with `options`, before its first step or where it stopped.

    `report` hears of what is done first: a teacher's texts or probabilities, which go on where they stopped, too.
    `ConfigError` or `ModelError` names what cannot be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give another place or remove it")
    if (work_folder(out) / JOURNAL).exists():
        raise ConfigError(f"{work_folder(out)} is of another command's run; remove it, or take another OUT")
    try:
        return _prepare(model, out, options, report)
    except OSError as error:
        where = error.filename or work_folder(out)
        raise ConfigError(
            f"{where} cannot be written: {error.strerror}; make room there, or give another OUT"
        ) from None


def _prepare(model: str, out: Path, options: TrainOptions, report: ProgressCallback) -> TrainingJob:
    work, source = work_folder(out), resolve(model)
    begun = str(_student_folder(model, options, work)) if options.new else model
    tokenizer = Tokenizer.from_folder(source)
    texts = TextDataset(tokenizer, ChatTemplate.from_folder(source, tokenizer), options.length, options.rationales)
    data = [Path(path) for path in options.data]
    if options.loss == "text" and options.teacher is not None:
        data = [_answers(options, data, work, report)]
    rows = [row for path in data for row in texts.read(path)]
    if not rows:
        raise ConfigError(f"--data holds nothing to learn in {options.length} tokens a row", param="data")
    net, parameters, adapter = _trainable(begun, options)
    if options.length > net.spec.max_position:
        raise ConfigError(
            f"--length {options.length}: {net.name} has {net.spec.max_position} positions", param="length"
        )
    tokenizer.check_vocab(net.spec.vocab_size)
    objective = _objective(net, rows, options, work, report)
    if isinstance(objective, DistillationLoss) and objective.hidden is not None:
        parameters |= objective.hidden.parameters
    learner = NetLearner(net, parameters, objective, rows, options.batch, options.seed, options.checkpointing)
    kept = {k: v for k, v in msgspec.to_builtins(options).items() if k not in RESULT_NEUTRAL}
    taught = "" if options.teacher is None else sampled_digest(resolve(options.teacher))
    plan = TrainingPlan(kept, sampled_digest(source), taught, rows_digest(rows))
    run = TrainingRun(
        learner, LearningSchedule(options.steps, options.highest), plan, work / "state.safetensors", options.paged
    )
    run.resume()
    return TrainingJob(run, net, adapter, tuple(_notes(texts, rows, parameters.values())), model, out)


def _notes(texts: TextDataset, rows: Sequence[TrainingRow], parameters: Iterable[Tensor]) -> Iterable[str]:
    yield f"{len(rows):,} rows, {sum(p.numel() for p in parameters):,} numbers to learn"
    if texts.cut:
        yield f"{texts.cut:,} rows were longer and are cut, {texts.left_out:,} of them left out whole"


def _student_folder(model: str, options: TrainOptions, work: Path) -> Path:
    """Return the folder of the student that a run begins with; it is written once."""
    folder = _cache_path(work, "student", model, options.layers, options.student, options.seed)
    if not folder.exists():
        teacher = ParametrizedNet.of(model)
        if options.layers:
            write_truncated_student(teacher, options.layers, folder, checkpoint_dtype(teacher))
        else:
            write_random_student(teacher, _fields(options.student), options.seed, folder, checkpoint_dtype(teacher))
    return folder


def _fields(given: Sequence[str]) -> dict[str, Any]:
    """Parse FIELD=VALUE, a value as JSON."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--student {each!r} is not FIELD=VALUE, as num_hidden_layers=4", param="student")
    return found


def _trainable(model: str, options: TrainOptions) -> tuple[ParametrizedNet, dict[str, Tensor], LoRA | None]:
    """Return the net, its parameters, and the adapter if it is one."""
    net = ParametrizedNet.of(model)
    if options.method in ("qat", "full"):
        net.parametrized.parametrizations.append(PruningMasks(net).value)
        if options.method == "qat":
            scheme, kept = QUANTIZERS[SCHEMES[options.bits]], CACHES[options.kv_cache_dtype]
            fake_quantize(net, scheme, options.group_size, checkpoint_dtype(net), kept)
        return net, trainable_tensors(net, options.targets), None
    lora = LoRA(net, target_modules(net, options.targets or ("*",)), options.rank, options.alpha, options.seed)
    if options.method == "qlora":
        quantize_base(net)
    net.parametrized.parametrizations.append(lora.value)
    return net, dict(lora.parameters), lora


def _objective(
    net: ParametrizedNet, rows: Sequence[TrainingRow], options: TrainOptions, work: Path, report: ProgressCallback
) -> Objective:
    if options.teacher is None or options.loss == "text":
        return CrossEntropy()
    hidden, teacher = None, ParametrizedNet.of(options.teacher)
    if options.hidden:
        hidden = HiddenStateLoss(net, teacher, options.seed)
    said: Teacher = NetTeacher(teacher, () if hidden is None else tuple(set(hidden.pairs.values())))
    if options.top:
        folder = _cache_path(work, "teacher", options.teacher, options.top, options.temperature, rows_digest(rows))
        cache_teacher(
            teacher, rows, folder, options.top, options.temperature,
            lambda done: report("rows of the teacher", done, len(rows)),
        )  # fmt: skip
        said = CachedTeacher(folder, rows)
    return DistillationLoss(said, options.loss, options.temperature, options.share, hidden, options.hidden)


def _answers(options: TrainOptions, data: Sequence[Path], work: Path, report: ProgressCallback) -> Path:
    """Return the file of what the teacher writes for the prompts in `data`."""
    prompts = [prompt for path in data for prompt in read_prompts(path)]
    asked = prompts, options.temperature, options.seed, options.max_tokens, options.rationales > 0
    out = _cache_path(work, "answers", options.teacher or "", *asked).with_suffix(".jsonl")
    if not out.is_file():
        params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
        with LLM(options.teacher or "") as llm:
            write_answers(
                llm, prompts, out, params, options.rationales > 0,
                lambda done: report("texts of the teacher", done, len(prompts)),
            )  # fmt: skip
    return out


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a .jsonl file, or the lines of any other; `ConfigError` names a line that has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: cannot be read as UTF-8 text: {error}", param="data") from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--data {path}, line {number}: is not JSON ({error})", param="data") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ConfigError(f'--data {path}, line {number}: needs a "prompt", which is text', param="data")
        prompts.append(entry["prompt"])
    return prompts
