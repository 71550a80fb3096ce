"""`quire compress`: a model made smaller by a recipe, or by one stage."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.flags import option_command
from quire.cli.params import PATH, argument, quiet_option
from quire.core.errors import ConfigError
from quire.core.options.fields import about
from quire.core.options.values import read_options, toml_value

if TYPE_CHECKING:
    from quire.compress.recipes.parser import Recipe

SHORT = ("quantize", "prune")
"""Kinds of stages that have a flag of their own."""


class CompressOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is done, by names of the command line."""

    recipe: Annotated[str | None, about("A file of stages, RECIPE.toml.")] = None
    frontier: Annotated[
        tuple[str, ...],
        about(
            "In place of one recipe: a file of stages, each tried in a folder of OUT; quality is drawn against size "
            "and speed. May be given several times."
        ),
    ] = ()
    quantize: Annotated[
        str | None,
        about(
            "In place of a recipe: quantize by this method (rtn, gptq, awq, smoothquant, llm_int8, fp8, nf4, mxfp4, "
            "mixed, gguf), or to a GGUF file in this format (F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, "
            "Q4_K, Q5_K, Q6_K; Q4_K_M and the like are taken as Q4_K)."
        ),
    ] = None
    prune: Annotated[
        str | None,
        about("In place of a recipe: prune by this method (magnitude, wanda, sparsegpt, structured)."),
    ] = None
    set: Annotated[
        tuple[str, ...],
        about(
            "NAME=VALUE, an option of that method (bits=4), or of a table (calibration.samples=64). May be given "
            "several times."
        ),
    ] = ()
    passport: Annotated[bool, about("Measure OUT beside SOURCE, and write what it cost to quire.json.")] = True
    restart: Annotated[bool, about("Begin anew where another run was stopped.")] = False


@option_command(
    "compress",
    {"Compression": CompressOptions},
    argument("source", metavar="SOURCE", help="Folder or hub name; pydoc is the bundled model."),
    argument("out", metavar="OUT", type=PATH, help="The folder to write; a run that stopped goes on."),
    quiet_option(),
    model_argument=False,
)
def compress(options: dict[str, Any], source: str, out: Path) -> None:
    """Make SOURCE smaller, and write it to OUT."""
    from quire.compress.recipes.parser import read_recipe

    given = read_options(CompressOptions, options)
    source = "" if source == "pydoc" else source
    if given.frontier:
        if (given.recipe, given.quantize, given.prune) != (None, None, None) or given.set or not given.passport:
            raise ConfigError("--frontier stands alone: it measures all of its recipes", param="frontier")
        _sweep(source, out, [Path(name) for name in given.frontier], given.restart)
        return
    short = {
        kind: method for kind, method in zip(SHORT, (given.quantize, given.prune), strict=True) if method is not None
    }
    if (given.recipe is None) != (len(short) == 1):
        raise ConfigError(
            "give one of --recipe FILE, --quantize METHOD, --prune METHOD and --frontier FILE", param="recipe"
        )
    if given.recipe is not None:
        asked = read_recipe(Path(given.recipe))
    else:
        (kind, method), *_ = short.items()
        asked = _of_flags(*_method_of(kind, method, given.set))
    from quire.compress.checkpoint.net import opened_here
    from quire.compress.layouts.gguf_assistants import is_assistant, open_source
    from quire.compress.pipelines.recipe_runner import compress as run_recipe
    from quire.core.progress import stage

    layers = (open_source if is_assistant(source) else opened_here)(source).spec.layers
    with stage("compress", len(asked.stages) * layers) as at:
        run_recipe(
            source, out, asked, lambda following: at.advance(note=following), restart=given.restart,
            passport=given.passport,
        )  # fmt: skip
    _tell(source, out)


def _method_of(kind: str, method: str, words: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """The kind of stage, its method and its options: a format of GGUF files in place of a method is gguf's `format`.

    One line on standard error says what is written in place of a mixture. `ConfigError` for what is neither.
    """
    from quire.compress.recipes.gguf_formats import FORMATS, gguf_format, mixture_note
    from quire.compress.recipes.stages import METHODS

    known = METHODS[kind]
    if kind == "quantize" and method not in known:
        if gguf_format(method) is None:
            raise ConfigError(
                f"--quantize {method!r} is not one of {', '.join(known)}, nor a format of GGUF files: "
                f"{', '.join(FORMATS)}",
                param="quantize",
            )
        method, words = "gguf", (*words, f"format={method}")
    if method == "gguf":
        formats = [word.partition("=")[2] for word in words if word.partition("=")[0] == "format"]
        if len({gguf_format(name) or name for name in formats}) > 1:
            raise ConfigError(f"--set format: {' and '.join(formats)} differ; give one", param="set")
        for note in {mixture_note(name) for name in formats} - {""}:
            print(f"quire: {note}", file=sys.stderr)
    return kind, method, words


def _tell(source: str, out: Path) -> None:
    """What was won and lost, as far as it was measured, and what to type next."""
    from quire.cli.show import show_columns, show_next
    from quire.compress.evaluation.passport import passport_changes, read_passport
    from quire.compress.layouts.gguf_assistants import is_assistant
    from quire.compress.pipelines.recipe_runner import unmeasured
    from quire.compress.pipelines.training import ADAPTER_CONFIG

    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    found, given, made = read_passport(out), source or "pydoc", shlex.quote(str(out))
    if found is not None:
        if found.calibration:
            print(f"calibrated on {found.calibration}")
        if found.evaluation.origin:
            print(f"measured on {found.evaluation.origin}: {found.evaluation.tokens:,} tokens")
        rows = [change.cells for change in passport_changes(found)]
        show_columns(("", given, out.name, "change", ""), rows)
    print(f"{out}: {size / 2**20:.1f} MiB")
    if (out / ADAPTER_CONFIG).exists():
        adapter = f"quire serve {shlex.quote(given)} --enable-lora --lora-modules {shlex.quote(out.name)}={made}"
        show_next((adapter, "serve the model with this adapter"))
        return
    if is_assistant(source):
        asked = json.dumps({"method": "mtp", "model": str(out)})
        target = f"quire serve TARGET --speculative-config {shlex.quote(asked)}"
        show_next((target, "serve TARGET, which it drafts for"))
        return
    again = (
        f"quire eval {made} --against {shlex.quote(given)}",
        "measure what that cost" if found is None else "measure it again",
    )
    show_next((f"quire serve {made}", "serve it"), *(() if unmeasured(source) else (again,)))


def _sweep(source: str, out: Path, files: list[Path], restart: bool) -> None:
    """Try the recipes of `files`, and draw them."""
    from quire.compress.checkpoint.net import opened_here
    from quire.compress.pipelines.recipe_runner import sweep
    from quire.compress.recipes.parser import read_recipe
    from quire.core.progress import stage

    recipes = {path.stem: read_recipe(path) for path in files}
    if len(recipes) < len(files):
        raise ConfigError("--frontier: two files have one name, by which a recipe is drawn", param="frontier")
    layers = opened_here(source).spec.layers
    stages = sum(len(recipe.stages) for name, recipe in recipes.items() if not (out / name).exists())
    with stage("compress", layers * stages) as at:
        drawn = sweep(source, out, recipes, lambda following: at.advance(note=following), restart=restart)
    print("\n".join(map(str, drawn)))


def _of_flags(kind: str, method: str, words: Sequence[str]) -> Recipe:
    """The recipe of one stage."""
    from msgspec import to_builtins

    from quire.compress.recipes.parser import recipe_of, stage_from_flags

    options, tables = dict[str, str](), dict[str, dict[str, object]]()
    for word in words:
        name, found, value = word.partition("=")
        if not found:
            raise ConfigError(f"--set {word}: NAME=VALUE is needed", param="set")
        table, dot, key = name.replace("-", "_").rpartition(".")
        if not dot:
            options[key] = value
            continue
        given = toml_value(value)
        tables.setdefault(table, {})[key] = value.split(",") if given == value and key == "files" else given
    return recipe_of({**tables, "stage": [to_builtins(stage_from_flags(kind, method, options))]}, "--set")
