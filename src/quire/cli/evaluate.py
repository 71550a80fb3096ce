"""`quire eval`: how good a model is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.params import PATH, option, quiet_option
from quire.cli.show import show, show_columns, show_next
from quire.core.errors import ConfigError
from quire.core.options.command_aliases import EVAL
from quire.core.options.fields import about
from quire.core.options.values import check_values, read_options

SETS = ("text", "choices", "answers")
"""Sets of `quire.bench.evaluating`, which is imported when it is needed."""

if TYPE_CHECKING:
    from quire.compress.evaluation.passport import Passport
    from quire.core.config import EngineConfig
    from quire.engine.llm import LLM


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is scored on."""

    text: Annotated[tuple[str, ...], about("Text file to score; may be given several times.")] = ()
    set: Annotated[
        tuple[str, ...],
        about(
            f"Score on a set of quire's own: {', '.join(SETS)} (text of several domains and languages, questions with "
            "choices, short answers). May be given several times; all where the model brings no questions itself."
        ),
    ] = ()
    beside: Annotated[
        str | None, about("Score this model on the same sets, and print how far the two differ, with the error.")
    ] = None
    chat: Annotated[
        bool | None, about("Ask for short answers through the chat template; by default where there is one.")
    ] = None
    limit: Annotated[int, about("Questions, held-out modules or pieces of text at most; 0 = all.", ge=0)] = 0
    against: Annotated[str | None, about("The model that it was made of: what that cost, and won in speed.")] = None
    rounds: Annotated[int, about("Rounds of timing with --against; 0 = none.", ge=0)] = 5
    also: Annotated[tuple[str, ...], about("Timed with this --quantization as well, with --against.")] = ()

    def validate(self) -> None:
        """Refuse what does not go together, naming the option."""
        check_values(self)
        if unknown := [name for name in self.set if name not in SETS]:
            raise ConfigError(f"--set {unknown[0]}: one of {', '.join(SETS)} is needed", param="set")
        if self.against is not None and (self.set or self.beside is not None):
            raise ConfigError("--against measures a passport: leave --set and --beside out", param="against")


@option_command(
    "eval",
    {"Evaluation": EvalOptions} | ENGINE,
    option("--output", "-o", type=PATH, help="Write the results to this JSON file; a passport: or folder."),
    quiet_option(),
    foreign=EVAL,
)
def evaluate(options: dict[str, Any], output: Path | None) -> None:
    """How good a model is: perplexity, questions with choices and short answers; beside another; passports.

    A model's own questions and held-out modules are taken where its folder has them, as the bundled one's has.
    """
    asked = read_options(EvalOptions, options)
    asked.validate()
    config = to_engine(options)
    texts = {name: _read(Path(name)) for name in asked.text}
    _check_output(output)
    if asked.against is not None:
        passport = _passport(config, asked.against, texts, asked.limit, asked.rounds, asked.also)
        if output is not None:
            from quire.compress.evaluation.passport import write_passport

            write_passport(output, passport)
        return
    if asked.set or asked.beside is not None or (not texts and not _has_questions(config)):
        from quire.cli.evaluate_sets import evaluate_sets

        sets = asked.set or (("text",) if texts else SETS)
        _write(evaluate_sets(config, asked.beside, sets, asked.limit, texts or None, asked.chat), output)
        return
    from quire.cli.generate import open_llm

    with open_llm(config) as llm:
        results = _measure(llm, texts, asked.limit)
    _print(results)
    model = shlex.quote(config.model.model or "pydoc")
    show_next(
        (f"quire eval {model} --set choices --set answers --set text", "quire's sets for any model"),
        (f"quire eval {model} --beside OTHER", "the same of another model, with the differences"),
    )
    _write(results, output)


def _has_questions(config: EngineConfig) -> bool:
    """Whether the model brings questions of its own."""
    from quire.model.disk.checkpoint import resolve
    from quire.store.hub import hub_of

    return (resolve(config.model.model, hub_of(config.model)) / "questions.jsonl").is_file()


def _write(results: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        import json

        try:
            output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}", param="output") from None


def _check_output(output: Path | None) -> None:
    """A place that cannot be written to is refused before the minutes of measuring."""
    if output is not None and not (output.is_dir() or output.parent.is_dir()):
        raise ConfigError(f"--output {output}: there is no folder {output.parent}", param="output")


def _passport(
    config: EngineConfig, against: str, texts: dict[str, str], limit: int, rounds: int, also: Sequence[str]
) -> Passport:
    """Measured and printed. The source is served as it is stored, and else with the model's own options."""
    from msgspec.structs import replace

    from quire.compress.evaluation.passport import passport_changes, passport_rows
    from quire.compress.evaluation.quality_measurement import passport_of

    source = replace(config, model=replace(config.model, model=against, quantization="none"))
    passport = passport_of(config, source, texts or None, limit, rounds, also=also)
    show(passport.model, passport_rows(passport))
    show_columns(("", against, "model", "change", ""), [change.cells for change in passport_changes(passport)])
    show_next((f"quire serve {shlex.quote(config.model.model or 'pydoc')}", "serve it"))
    return passport


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text: {error}", param="text") from None


def _measure(llm: LLM, texts: dict[str, str], limit: int) -> dict[str, Any]:
    from quire.bench import quality

    info, folder = llm.info, Path(llm.info.folder)
    results: dict[str, Any] = {
        "model": info.model,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "backend": info.backend,
        "weight_bytes": info.weight_bytes,
    }
    if texts:
        return results | {"perplexity": quality.perplexity(llm, texts)}
    questions = quality.read_questions(folder)
    heldout = quality.heldout_texts(folder)
    if limit:
        questions = questions[:: max(1, len(questions) // limit)][:limit]
        heldout = dict(list(heldout.items())[:limit])
    answers = quality.exact_answers(llm, questions)
    return results | {"exact_answers": answers, "perplexity": quality.perplexity(llm, heldout)}


def _print(results: dict[str, Any]) -> None:
    print(
        f"{results['model']}: {results['dtype']}, quantization {results['quantization']}, "
        f"KV cache {results['kv_cache_dtype']}"
    )
    answers = results.get("exact_answers")
    if answers:
        print(f"exact answers: {answers['right']} of {answers['total']} ({answers['percent']:.2f} %)")
        for miss in answers["misses"]:
            print(f"  missed: {miss['question']}\n    expected {miss['expected']!r}\n    answered {miss['answer']!r}")
    found = results["perplexity"]
    print(
        f"perplexity: {found['perplexity']:.3f}, {found['bits_per_byte']:.4f} bits per byte "
        f"({found['tokens']:,} tokens, {found['bytes']:,} bytes, {found['texts']} texts)"
    )
