"""Training stages of a recipe: training, recovery, distillation and merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.compress.calibration.text import library_texts
from quire.compress.checkpoint.net import Net
from quire.compress.pipelines.stage_io import StageContext
from quire.compress.recipes.stages import DistilLogits, DistilText, Lora, Merge, Qat, Qlora, Student, Training
from quire.compress.train.job import prepare, write_merged
from quire.compress.train.options import PLAIN, TrainOptions
from quire.core import progress
from quire.core.errors import ConfigError, ModelError
from quire.core.progress import named_stages
from quire.model.disk.checkpoint import resolve

TEXT_BYTES = 4 << 20
"""Of the standard library's sources, where a recipe names no text."""
LOSSES = {"forward": "kl", "reverse": "reverse-kl", "js": "js"}
BITS = {"int4": "4", "int8": "8", "fp8": "fp8"}
ADAPTER_CONFIG = "adapter_config.json"


def run_training(context: StageContext, stage: Training) -> None:
    """Train the stage's model as it says, and write the result."""
    options = train_options(context, stage)
    options.validate()
    layers, told = Net.open(context.teacher).spec.layers, 0
    with named_stages() as tell:
        job = prepare(context.model, context.target, options, tell)

    def report(step: int, loss: float) -> None:
        nonlocal told
        while told < step * layers // options.steps:
            told += 1
            context.report(stage.method)
        at.update(step, note=f"loss {loss:.3f}")

    with progress.stage("training", options.steps, done=job.run.step) as at:
        job.run.go(report)
    job.write()
    if stage.kind == "recover" and job.adapter is not None:
        adapter = context.target.rename(context.target.with_name(f"{context.target.name}-adapter"))
        write_merged(context.model, adapter, context.target)


def run_merge(context: StageContext, stage: Merge) -> None:
    """Write a model with an adapter merged in: the one that the stage before made, or a folder's."""
    if stage.adapter:
        write_merged(context.model, Path(stage.adapter), context.target)
        return
    facts = Path(context.model) / ADAPTER_CONFIG
    if not facts.is_file():
        raise ConfigError(f"stage {context.number + 1}: the stage before it made no adapter; name one", param="recipe")
    base = json.loads(facts.read_text())["base_model_name_or_path"]
    write_merged(base, Path(context.model), context.target)


def train_options(context: StageContext, stage: Training) -> TrainOptions:
    """Translate the stage to the options of `quire train`."""
    common: dict[str, Any] = {
        "data": training_data(context, stage), "steps": stage.steps, "batch": stage.batch, "length": stage.length,
        "rate": stage.learning_rate, "seed": stage.seed,
    }  # fmt: skip
    if stage.kind == "distil":
        return TrainOptions(
            **common, method="full", teacher=context.teacher or str(resolve("")), **_teacher_options(stage)
        )
    if isinstance(stage, Lora):
        own: dict[str, Any] = {"rank": stage.rank, "alpha": stage.alpha, "targets": _globs(stage.targets)}
        return TrainOptions(**common, method=stage.method, **own, paged=isinstance(stage, Qlora) and stage.paged)
    if isinstance(stage, Qat):
        kept = "auto" if stage.kv == "none" else stage.kv
        return TrainOptions(
            **common, method="qat", bits=BITS[stage.format], group_size=stage.group_size, kv_cache_dtype=kept
        )
    return TrainOptions(**common, method="full", targets=_globs(stage.targets))


def _teacher_options(stage: Training) -> dict[str, Any]:
    found: dict[str, Any] = {"student": _student(getattr(stage, "student", None))}
    if isinstance(stage, DistilLogits):
        found |= {"loss": LOSSES[stage.divergence], "temperature": stage.temperature}
    elif isinstance(stage, DistilText):
        found |= {"loss": "text", "temperature": stage.temperature, "max_tokens": stage.max_tokens}
        found |= {"rationales": float(stage.rationales)}
    else:
        found |= {"hidden": 1.0}
    return found


def _student(asked: Student | None) -> tuple[str, ...]:
    if asked is None:
        return ()
    names = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    }  # fmt: skip
    given = {name: getattr(asked, ours) for ours, name in names.items()}
    return tuple(f"{name}={value}" for name, value in given.items() if value is not None)


def _globs(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stage's globs, or the method's where it names none."""
    return PLAIN.targets if targets == ("*",) else targets


def training_data(context: StageContext, stage: Training) -> tuple[str, ...]:
    """List files of the stage's text, or the calibration's, or the shipped text."""
    given = stage.data or context.recipe.calibration.files
    if given:
        return given
    path = context.work.folder / "text.jsonl"
    if not path.exists():
        size, lines = 0, []
        for document in library_texts():
            size += len(document.text)
            lines.append(json.dumps({"text": document.text}))
            if size > TEXT_BYTES:
                break
        try:
            path.write_text("\n".join(lines) + "\n")
        except OSError as error:
            raise ModelError(f"{path} cannot be written: {error.strerror}; make room there") from None
    return (str(path),)
