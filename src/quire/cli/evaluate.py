"""`quire eval`: how good a model is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.params import PATH, option
from quire.core.errors import ConfigError

if TYPE_CHECKING:
    from quire.compress.evaluation.passport import Passport
    from quire.core.config import EngineConfig
    from quire.engine.llm import LLM


@option_command(
    "eval",
    ENGINE,
    option("--text", type=PATH, multiple=True, help="Text file to score; may be given several times."),
    option("--limit", type=click.IntRange(min=0), default=0, help="Questions and held-out modules at most; 0 = all."),
    option("--output", "-o", type=PATH, help="Write the results to this JSON file; a passport: or folder."),
    option("--against", metavar="SOURCE", help="The model that it was made of: what that cost, and won in speed."),
    option("--rounds", type=click.IntRange(min=0), default=5, help="Rounds of timing with --against; 0 = none."),
    option("--also", metavar="QUANTIZATION", multiple=True, help="Timed with this --quantization as well."),
)
def evaluate(
    options: dict[str, Any],
    text: tuple[Path, ...],
    limit: int,
    output: Path | None,
    against: str | None,
    rounds: int,
    also: tuple[str, ...],
) -> None:
    """Exact answers and perplexity of the bundled model; perplexity on --text of any model; passports."""
    config = to_engine(options)
    texts = {str(path): _read(path) for path in text}
    if against is not None:
        _check_output(output)
        passport = _passport(config, against, texts, limit, rounds, also)
        if output is not None:
            from quire.compress.evaluation.passport import write_passport

            write_passport(output, passport)
        return
    from quire.cli.generate import open_llm

    with open_llm(config) as llm:
        results = _measure(llm, texts, limit)
    _print(results)
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

    from quire.cli.show import show
    from quire.compress.evaluation.passport import passport_rows
    from quire.compress.evaluation.quality_measurement import passport_of

    source = replace(config, model=replace(config.model, model=against, quantization="none"))
    passport = passport_of(config, source, texts or None, limit, rounds, also=also)
    show(passport.model, passport_rows(passport))
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
    if not (folder / "questions.jsonl").is_file():
        raise ConfigError(f"{folder} has no questions.jsonl; give texts to score with --text FILE", param="text")
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
