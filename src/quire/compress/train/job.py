"""A run of training from its options: what is read, what learns by what, and the folder that is written."""

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

from quire.compress.net import Net
from quire.compress.plain import as_plain
from quire.compress.resume import JOURNAL, work_folder
from quire.compress.train.adapt import LoRA, chosen, freeze, merge
from quire.compress.train.distil import Hidden, KeptTeacher, NetTeacher, OfTeacher, Teacher, digest_of, keep
from quire.compress.train.learner import NetLearner
from quire.compress.train.objective import Objective, OfText
from quire.compress.train.options import TrainOptions
from quire.compress.train.qat import fake_quantize
from quire.compress.train.recover import Masks, tuned
from quire.compress.train.seen import SeenNet
from quire.compress.train.student import fewer_layers, from_scratch
from quire.compress.train.teacher_text import write_answers
from quire.compress.train.text import Row, Texts
from quire.compress.write import whole_folder, write_folder
from quire.core.dtypes import F8, I8
from quire.core.errors import ConfigError
from quire.core.files import sampled_digest
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.model.describe import open_model
from quire.model.disk.checkpoint import resolve
from quire.ops.lazy import torch_dtype
from quire.quant.registry import QUANTIZERS
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.training.loop import LearningSchedule, TrainingRun

SAME_RESULT = ("paged", "checkpointing")
"""Options that change no number, so that a run may go on with others."""
SCHEMES = {"4": "int4", "8": "int8", "fp8": "fp8"}
CACHES = {"auto": None, "int8": I8, "fp8": F8}
Tell = Callable[[str, int, int], None]
"""(what is done, how much of it, of how much)"""


@dataclass(frozen=True)
class Plan:
    """What a run is: one that goes on must be of the same."""

    options: Mapping[str, Any]
    model: str
    teacher: str
    rows: str


@dataclass(frozen=True)
class Job:
    """A run, and what is written of it once it is done. `notes`: what a user should know of it beforehand."""

    run: TrainingRun
    net: SeenNet
    adapter: LoRA | None
    notes: tuple[str, ...]
    model: str
    out: Path

    def write(self) -> None:
        """Write the adapter, or the model, and remove what the run kept beside it."""
        if self.adapter is None:
            write_folder(self.out, self.net.tensors, self.net.config, self.net.folder, dtype_of(self.net))
        else:
            with whole_folder(self.out) as folder:
                self.adapter.write(folder, self.model)
        shutil.rmtree(work_folder(self.out), ignore_errors=True)


def _named(work: Path, what: str, model: str, *facts: object) -> Path:
    """Where what is made of `model` and `facts` is kept, so that what others made is not taken for it."""
    found = hashlib.blake2b(f"{sampled_digest(resolve(model))} {facts}".encode(), digest_size=8)
    return work / f"{what}-{found.hexdigest()}"


def dtype_of(net: Net) -> torch.dtype:
    """The dtype in which most of the model's numbers were read, in which it is written."""
    made: torch.dtype = torch_dtype(net.opened.dtype)
    return made


def merged(model: str, adapter: Path, out: Path) -> None:
    """Write `model` with the PEFT adapter in the folder `adapter` merged in, to `out`."""
    net = Net(as_plain(open_model(model)), torch.float32)
    merge(net, adapter)
    write_folder(out, net.tensors, net.config, net.folder, dtype_of(net))


def prepare(model: str, out: Path, options: TrainOptions, tell: Tell) -> Job:
    """The job of training `model` with `options`, before its first step or where it stopped.

    `tell` hears of what is done first: a teacher's texts or probabilities, which go on where they stopped, too.
    `ConfigError` or `ModelError` names what cannot be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give another place or remove it")
    if (work_folder(out) / JOURNAL).exists():
        raise ConfigError(f"{work_folder(out)} is of another command's run; remove it, or take another OUT")
    try:
        return _prepare(model, out, options, tell)
    except OSError as error:
        where = error.filename or work_folder(out)
        raise ConfigError(
            f"{where} cannot be written: {error.strerror}; make room there, or give another OUT"
        ) from None


def _prepare(model: str, out: Path, options: TrainOptions, tell: Tell) -> Job:
    work, source = work_folder(out), resolve(model)
    begun = str(_begin(model, options, work)) if options.new else model
    tokenizer = Tokenizer.from_folder(source)
    texts = Texts(tokenizer, ChatTemplate.from_folder(source, tokenizer), options.length, options.rationales)
    data = [Path(path) for path in options.data]
    if options.loss == "text" and options.teacher is not None:
        data = [_answers(options, data, work, tell)]
    rows = [row for path in data for row in texts.read(path)]
    if not rows:
        raise ConfigError(f"--data holds nothing to learn in {options.length} tokens a row", param="data")
    net, parameters, adapter = _learning(begun, options)
    if options.length > net.spec.max_position:
        raise ConfigError(
            f"--length {options.length}: {net.name} has {net.spec.max_position} positions", param="length"
        )
    tokenizer.check_vocab(net.spec.vocab_size)
    objective = _objective(net, rows, options, work, tell)
    if isinstance(objective, OfTeacher) and objective.hidden is not None:
        parameters |= objective.hidden.parameters
    learner = NetLearner(net, parameters, objective, rows, options.batch, options.seed, options.checkpointing)
    kept = {k: v for k, v in msgspec.to_builtins(options).items() if k not in SAME_RESULT}
    taught = "" if options.teacher is None else sampled_digest(resolve(options.teacher))
    plan = Plan(kept, sampled_digest(source), taught, digest_of(rows))
    run = TrainingRun(
        learner, LearningSchedule(options.steps, options.highest), plan, work / "state.safetensors", options.paged
    )
    run.resume()
    return Job(run, net, adapter, tuple(_notes(texts, rows, parameters.values())), model, out)


def _notes(texts: Texts, rows: Sequence[Row], parameters: Iterable[Tensor]) -> Iterable[str]:
    yield f"{len(rows):,} rows, {sum(p.numel() for p in parameters):,} numbers to learn"
    if texts.cut:
        yield f"{texts.cut:,} rows were longer and are cut, {texts.left_out:,} of them left out whole"


def _begin(model: str, options: TrainOptions, work: Path) -> Path:
    """The folder of the student that a run begins with; it is written once."""
    folder = _named(work, "student", model, options.layers, options.student, options.seed)
    if not folder.exists():
        teacher = SeenNet.of(model)
        if options.layers:
            fewer_layers(teacher, options.layers, folder, dtype_of(teacher))
        else:
            from_scratch(teacher, _fields(options.student), options.seed, folder, dtype_of(teacher))
    return folder


def _fields(given: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE, a value as JSON."""
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


def _learning(model: str, options: TrainOptions) -> tuple[SeenNet, dict[str, Tensor], LoRA | None]:
    """The net, what of it is learned, and the adapter if it is one."""
    net = SeenNet.of(model)
    if options.method in ("qat", "full"):
        net.seen.values.append(Masks(net).value)
        if options.method == "qat":
            scheme, kept = QUANTIZERS[SCHEMES[options.bits]], CACHES[options.kv_cache_dtype]
            fake_quantize(net, scheme, options.group_size, dtype_of(net), kept)
        return net, tuned(net, options.targets), None
    lora = LoRA(net, chosen(net, options.targets or ("*",)), options.rank, options.alpha, options.seed)
    if options.method == "qlora":
        freeze(net)
    net.seen.values.append(lora.value)
    return net, dict(lora.parameters), lora


def _objective(net: SeenNet, rows: Sequence[Row], options: TrainOptions, work: Path, tell: Tell) -> Objective:
    if options.teacher is None or options.loss == "text":
        return OfText()
    hidden, teacher = None, SeenNet.of(options.teacher)
    if options.hidden:
        hidden = Hidden(net, teacher, options.seed)
    said: Teacher = NetTeacher(teacher, () if hidden is None else tuple(set(hidden.pairs.values())))
    if options.top:
        folder = _named(work, "teacher", options.teacher, options.top, options.temperature, digest_of(rows))
        keep(
            teacher, rows, folder, options.top, options.temperature,
            lambda done: tell("rows of the teacher", done, len(rows)),
        )  # fmt: skip
        said = KeptTeacher(folder, rows)
    return OfTeacher(said, options.loss, options.temperature, options.share, hidden, options.hidden)


def _answers(options: TrainOptions, data: Sequence[Path], work: Path, tell: Tell) -> Path:
    """The file of what the teacher writes for the prompts in `data`."""
    prompts = [prompt for path in data for prompt in read_prompts(path)]
    asked = prompts, options.temperature, options.seed, options.max_tokens, options.rationales > 0
    out = _named(work, "answers", options.teacher or "", *asked).with_suffix(".jsonl")
    if not out.is_file():
        params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
        with LLM(options.teacher or "") as llm:
            write_answers(
                llm, prompts, out, params, options.rationales > 0,
                lambda done: tell("texts of the teacher", done, len(prompts)),
            )  # fmt: skip
    return out


def read_prompts(path: Path) -> list[str]:
    """The prompts of a .jsonl file, or the lines of any other; `ConfigError` names a line that has none."""
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
