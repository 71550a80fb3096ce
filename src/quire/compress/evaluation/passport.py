"""The passport of a compressed model, quire.json: what it cost in quality and won in speed, as measured.

Reading, showing and writing it needs no torch; `measure` makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError, ModelError
from quire.core.files import read_bounded, write_whole
from quire.figures.changes import Change, changed, with_text

FILE = "quire.json"
MAX_BYTES = 4 << 20
RATES = {"batch_1": "one stream", "batch_16": "sixteen streams", "prefill": "prompt"}
"""Rates of a passport -> what they are of, for people."""
BEGIN, END = "<!-- quire: measured -->", "<!-- quire: end -->"


class Answers(msgspec.Struct, frozen=True):
    """Questions of the folder's questions.jsonl that are answered with the same text."""

    right: int
    total: int


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of one model alone. `size_bytes`: its weights on the disk."""

    perplexity: float
    bits_per_byte: float
    size_bytes: int
    exact_answers: Answers | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second that one stream and sixteen together make, and at which a prompt is read."""

    batch_1: float
    batch_16: float
    prefill: float


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of `rounds` in which both models took turns; `ratio`: of the pairs' ratios, model to source.

    `weight_bytes`: in memory, of both.
    """

    format: str
    source_format: str
    rounds: int
    tokens_per_second: Rates
    source_tokens_per_second: Rates
    ratio: Rates
    weight_bytes: int
    source_weight_bytes: int


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an evaluation, and how the model was served (`format`).

    `tokens` were scored, of `kl_tokens` of which whole distributions were compared, in windows of `window` tokens.
    `origin`: what text, "" = the caller's.
    """

    texts: int
    tokens: int
    kl_tokens: int
    bytes: int
    window: int
    digest: str
    format: str
    origin: str = ""


class Passport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a model. `kl`: mean KL(source || model) of a token, in nats.

    `top1`: share of tokens whose likeliest next one is the source's. `digests`: of source, model, code, and of what
    else the model was made with. `calibration`: the text that it was calibrated on, "" = none.
    """

    model: str
    source: str
    perplexity: float
    bits_per_byte: float
    kl: float
    top1: float
    size_bytes: int
    exact_answers: Answers | None = None
    of_source: Quality
    speed: tuple[Speed, ...] = ()
    evaluation: Evaluation
    recipe: dict[str, Any] | None = None
    calibration: str = ""
    digests: dict[str, str]
    machine: dict[str, Any]
    date: str
    version: str


def read_passport(folder: Path) -> Passport | None:
    """Read the passport in a model's folder; None where there is none. `ModelError` for a file that is none."""
    path = folder / FILE
    try:
        return msgspec.json.decode(read_bounded(path, MAX_BYTES), type=Passport)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path} is no passport: {error}; remove it, or write one by quire eval --against") from None


def write_passport(path: Path, passport: Passport, title: str = "") -> None:
    """Write a passport to the file `path`, or into a model's folder with a section of its README.md.

    The README begins with `title` ("" = the folder's name) where there is none. `ConfigError` where that cannot be.
    """
    try:
        data = msgspec.json.format(msgspec.json.encode(passport), indent=2) + b"\n"
        if not path.is_dir():
            write_whole(path, data)
            return
        write_whole(path / FILE, data)
        readme = path / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.exists() else f"# {title or path.resolve().name}\n"
        write_whole(readme, with_section(text, passport).encode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}/README.md: is not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="output") from None


def with_section(readme: str, passport: Passport) -> str:
    """Return the text of a README with what was measured, in the place where it was before or else at the end."""
    section = f"{BEGIN}\n{_markdown(passport)}{END}\n"
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return before + section + after.removeprefix("\n")
    return f"{readme.rstrip()}\n\n{section}"


def passport_rows(passport: Passport) -> list[tuple[str, str]]:
    """List what a passport says, a line each, for people."""
    of, source = passport.evaluation, passport.of_source
    rows = [
        ("made of", passport.source),
        ("perplexity", f"{passport.perplexity:.3f} (source {source.perplexity:.3f})"),
        ("bits per byte", f"{passport.bits_per_byte:.4f} (source {source.bits_per_byte:.4f})"),
        ("KL to the source", f"{passport.kl:.6f} nats a token"),
        ("same likeliest token", f"{100 * passport.top1:.2f} %"),
    ]
    if passport.exact_answers is not None:
        beside = f" (source {_answers(source.exact_answers)})" if source.exact_answers else ""
        rows.append(("exact answers", _answers(passport.exact_answers) + beside))
    rows.append(("weights on disk", f"{passport.size_bytes:,} bytes (source {source.size_bytes:,})"))
    for speed in passport.speed:
        rows.append(("served as", f"{speed.format} (source: {speed.source_format})"))
        for name in Rates.__struct_fields__:
            own, ratio = getattr(speed.tokens_per_second, name), getattr(speed.ratio, name)
            rows.append((name.replace("_", " "), f"{own:,.1f} tokens/s, {ratio:.2f} of the source"))
    if passport.calibration:
        rows.append(("calibrated on", passport.calibration))
    where = passport.machine.get("processor", "an unknown machine")
    told = f"{of.texts} texts" + (f" ({of.origin}, digest {of.digest[:8]})" if of.origin else "")
    rows.append(("measured", f"{passport.date} on {where}, {of.format}, {of.tokens:,} tokens of {told}"))
    return rows


def passport_changes(passport: Passport) -> list[Change]:
    """Compare the model with its source, figure by figure: size, quality, memory and speed as far as measured.

    Rates are won or lost from 3 % on: less is within what rounds on a busy machine differ by.
    """
    source = passport.of_source
    found = [
        _bytes("weights on disk", source.size_bytes, passport.size_bytes),
        changed("perplexity", source.perplexity, passport.perplexity, ",.3f"),
        changed("bits per byte", source.bits_per_byte, passport.bits_per_byte, ".4f"),
        Change("KL to the source, nats a token", ("0", f"{passport.kl:.5f}"), "", "lost" if passport.kl > 1e-5 else ""),
        Change(
            "same likeliest token", ("100 %", f"{100 * passport.top1:.2f} %"), "", "lost" if passport.top1 < 1 else ""
        ),
    ]
    if passport.exact_answers is not None and source.exact_answers is not None:
        right = changed("exact answers", source.exact_answers.right, passport.exact_answers.right, rises=True)
        found.append(with_text(right, _answers(source.exact_answers), _answers(passport.exact_answers)))
    for speed in passport.speed:
        form = f" ({speed.format.split(', ')[1]})" if len(passport.speed) > 1 else ""
        found.append(_bytes(f"weights in memory{form}", speed.source_weight_bytes, speed.weight_bytes))
        for name, words in RATES.items():
            before, after = getattr(speed.source_tokens_per_second, name), getattr(speed.tokens_per_second, name)
            pair = changed(f"tokens/s, {words}{form}", before, after, ",.1f", rises=True, least=0.03)
            found.append(pair._replace(change=f"{getattr(speed.ratio, name) - 1:+.1%}"))
    return found


def _bytes(name: str, before: int, after: int) -> Change:
    return with_text(changed(name, before, after), f"{before / 2**20:,.1f} MiB", f"{after / 2**20:,.1f} MiB")


def _answers(of: Answers) -> str:
    return f"{of.right:,} of {of.total:,}"


def _markdown(passport: Passport) -> str:
    lines = ["## Measured", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in passport_rows(passport)]
    return "\n".join([*lines, "", f"All of it, with digests, is in `{FILE}`.", ""])
