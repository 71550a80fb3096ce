"""Runs of `quire compress`: the stages of a recipe one after the other, each from a folder to a folder.

Between two stages lies an ordinary model in OUT.partial, so any stage follows any other, and a run that is killed goes
on where it was: in the middle of a stage with what that saved, or with the next stage. `sweep` tries several recipes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from quire.bench.quality import general_heldout, heldout_texts
from quire.compress.calibration.text import CalibrationRows, calibration_rows
from quire.compress.checkpoint.net import Net
from quire.compress.evaluation.frontier import write_frontier
from quire.compress.evaluation.passport import Passport, read_passport, write_passport
from quire.compress.evaluation.quality_measurement import passport_of
from quire.compress.layouts.gguf_assistants import is_assistant
from quire.compress.pipelines.methods import RUNNERS
from quire.compress.pipelines.stage_io import StageContext
from quire.compress.pipelines.structured_pruning import check_structured
from quire.compress.pipelines.training import ADAPTER_CONFIG
from quire.compress.recipes.parser import Recipe
from quire.compress.recipes.stages import Distil, Gguf, Stage, Structured
from quire.compress.tracking.journal import WorkFolder, code_digest
from quire.core import progress
from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.core.files import sampled_digest
from quire.gguf.mmproj import KIND as MMPROJ
from quire.model.describe import open_model
from quire.model.disk.checkpoint import EMBEDDED, Checkpoint, resolve
from quire.model.transformers_backend.detect import borrowed_headers
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

log = logging.getLogger("quire.compress")
TEXTS, QUESTIONS = 4, 200
"""Held-out modules that a passport is measured on, and questions where the folder has some."""
WRITTEN_UNIT = "written"
"""The unit of a stage whose folder is there."""


def compress(
    source: str,
    out: Path,
    recipe: Recipe,
    report: Callable[[str], None],
    *,
    restart: bool = False,
    passport: bool = False,
) -> None:
    """Make `out` of the model `source` as `recipe` says. `report(what is next)` is called whenever a part of it is
    done.

    `restart`: begin anew where another run was stopped. `passport`: measure it beside the source, and write quire.json.
    `ConfigError` and `ModelError` in one line for what cannot be; nothing of `out` is there then.
    """
    folder = resolve(source)
    check_layers(source, recipe)
    rows = cache(lambda: calibration_text(folder, recipe))
    # Text of the user's is read also where no stage looks at it: what is wrong with it is told.
    wanted = bool(recipe.calibration.files) or any(stage.calibrated for stage in recipe.stages)
    text = rows() if wanted else None
    if text is not None:
        log.info("calibration: %s", text)
    key = {
        "recipe": recipe.digest,
        "source": sampled_digest(folder),
        "calibration": "" if text is None else text.digest,
        "version of quire": code_digest(),
    }
    with WorkFolder(out, key, restart) as work:
        if not work.finished:
            model = source
            for number, stage in enumerate(recipe.stages):
                target = work.folder / f"stage-{number}"
                spilled = work.folder if recipe.calibration.spill else None
                context = StageContext(number, model, target, source, recipe, work, rows, report, spilled)
                run_stage(context, stage)
                model = str(target)
            if passport and (why := unmeasured(source)):
                log.warning("%s: no passport is measured: %s", out, why)
            elif passport and not (Path(model) / ADAPTER_CONFIG).exists():
                with progress.stage("measuring what was made"):
                    measure_passport(source, Path(model), out.name, recipe, text)
        work.finish(lambda made: _link_folder(Path(model), made))


def unmeasured(source: str) -> str:
    """Why the logits of `source` tell nothing, "" where they do."""
    if is_assistant(source):
        return "it drafts for another model, and says nothing alone"
    if borrowed_headers(resolve(source)) is None and open_model(source).spec.bidirectional:
        return "it makes vectors, and has no text of its own that could be compared"
    return ""


def check_layers(source: str, recipe: Recipe) -> None:
    """Refuse a recipe that the model cannot go through, before any work.

    `ConfigError` where a stage is to run layers of the model one by one that read what others made, or takes out what
    the model cannot lose. A stage checks itself what it takes of another shape than the source's.
    """
    files_alone = all(isinstance(stage, Gguf) for stage in recipe.stages)
    if files_alone and is_assistant(source):
        return
    if files_alone and borrowed_headers(resolve(source)) is None and open_model(source).vision is not None:
        return  # what makes rows of images is written, too
    net = Net.open(source)
    reshaped = next((stage for stage in recipe.stages if isinstance(stage, Structured | Distil)), None)
    if isinstance(reshaped, Structured):
        check_structured(net.spec, reshaped)
    if net.opened.mtp is not None and (reshaped is not None or not isinstance(net.tensors.source, Checkpoint)):
        why = "it is made for the whole model" if reshaped is not None else "of quantized models it is not read"
        log.warning("%s: written without the layer that drafts: %s", net.name, why)
    reader = next((layer for layer in range(net.spec.layers) if net.reads(layer)), None)
    for number, stage in enumerate(recipe.stages, 1):
        if reader is not None and stage.by_layer:
            raise ConfigError(
                f"{net.name}: stage {number} ({stage.kind} {stage.method}) runs text through one layer at a time, but "
                f"layer {reader} reads what {net.reads(reader)} made; take a method without text, as quantize rtn",
                param="recipe",
            )


def run_stage(context: StageContext, stage: Stage) -> None:
    """Run one stage, unless it is done: `context.target` is there afterwards, and what was saved on the way is not."""
    work, number = context.work, context.number
    if work.done(number, WRITTEN_UNIT):
        return
    shutil.rmtree(context.target, ignore_errors=True)
    RUNNERS[stage.kind, stage.method](context, stage)
    work.save(number, WRITTEN_UNIT, {})
    work.drop(number)
    if number and not (context.target / ADAPTER_CONFIG).exists():  # an adapter is nothing without the model
        shutil.rmtree(context.model, ignore_errors=True)


def measure_passport(source: str, made: Path, name: str, recipe: Recipe, text: CalibrationRows | None) -> None:
    """Measure what was made beside its source, and write the passport in its folder.

    The text is the held-out part of the text that the recipe calibrates on, where that is shipped, and else of the
    general one. `text`: the calibration text.
    """
    file = next((path for path in made.glob("*.gguf") if not path.name.startswith(MMPROJ)), made)
    served, beside = (EngineConfig(model=ModelConfig(model=str(m))) for m in (file, source))
    if recipe.calibration.text == "python":
        texts, origin = dict(list(heldout_texts(EMBEDDED).items())[:TEXTS]), "modules of Python's standard library"
    else:
        texts, origin = general_heldout(), "quire's general text, held-out part"
    digests = {} if text is None else {"calibration": text.digest}
    found = passport_of(served, beside, texts, QUESTIONS, recipe=recipe, digests=digests)
    evaluation = replace(found.evaluation, origin=origin)
    looked = "" if text is None else str(text)
    write_passport(made, replace(found, model=name, evaluation=evaluation, calibration=looked), name)


def calibration_text(folder: Path, recipe: Recipe) -> CalibrationRows:
    """Return the calibration text of a recipe in tokens of the model."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer, None, recipe.calibration.length)
    return calibration_rows(recipe.calibration, tokenizer, template)


def _link_folder(model: Path, made: Path) -> None:
    """Link the last stage's folder as the result. Nothing is moved: `made` begins anew after a kill amid this."""
    shutil.copytree(model, made, copy_function=_link_file, dirs_exist_ok=True)


def _link_file(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


PAGE, PICTURE = "frontier.html", "frontier.png"


def sweep(
    source: str, out: Path, recipes: Mapping[str, Recipe], report: Callable[[str], None], *, restart: bool = False
) -> list[Path]:
    """Make `out`/NAME of `source` by each of `recipes` (name -> recipe), with its passport, and draw them all in `out`.

    Returns the drawings that were made: a page, and a PNG where there is matplotlib. They are drawn anew after each
    recipe, so that a run which ends early has shown what it knows. A folder that is there already is of an earlier run:
    it is not made again (`restart`: what was begun and not finished is begun anew). `report` as of `compress`.
    `ConfigError` where a folder was made by another recipe, and for what a recipe cannot do.
    """
    found: dict[str, Passport] = {}
    drawn = [out / PAGE, *([out / PICTURE] if find_spec("matplotlib") else [])]
    for name, recipe in recipes.items():
        made = out / name
        if not made.exists():
            compress(source, made, recipe, report, restart=restart, passport=True)
        passport = read_passport(made)
        if passport is None or passport.digests.get("recipe") != recipe.digest:
            raise ConfigError(f"{made} was not made and measured by recipe {name}; remove it, or take another OUT")
        found[name] = passport
        for path in drawn:
            write_frontier(path, found)
    return drawn
