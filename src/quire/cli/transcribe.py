"""`quire transcribe`: what is said in audio files, as text, subtitles or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, set_model, to_engine
from quire.cli.generate import open_llm
from quire.cli.model_names import is_stored
from quire.cli.params import PATH, argument, option, quiet_option
from quire.core.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.speech.transcript import Transcript

FORMATS = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}
TOGETHER = 8
"""Files that are decoded and share steps at a time: an hour takes 350 MB."""


@option_command(
    "transcribe",
    ENGINE,
    argument(
        "words",
        metavar="[MODEL] FILE...",
        nargs=-1,
        help="Audio files: wav, flac, ogg, mp3. A first one that is a folder, or the name of a pulled model, is the "
        "model.",
    ),
    option("--output", "-o", type=PATH, help="File to write, or a folder, of a file for each of several."),
    option(
        "--format",
        "form",
        type=click.Choice(tuple(FORMATS)),
        help="Text, subtitles, or JSON with all that is known of segments. The default goes by the output's name.",
    ),
    option("--language", help="Language that is spoken, as en or english. By default, the sound says it."),
    option("--task", type=click.Choice(("transcribe", "translate")), default="transcribe",
           help="Write what is said, or say it in English."),
    option("--prompt", "-p", metavar="TEXT", help="A text that comes before, for names and style."),
    option("--timestamps/--no-timestamps", default=True, help="Have the model say when each segment was said."),
    option("--word-timestamps", is_flag=True, help="Find out when each word was said, for --format json."),
    option("--temperature", type=click.FloatRange(0.0, 2.0),
           help="Temperature of sampling. By default 0, and more where a text is not good."),
    quiet_option(),
    model_argument=False,
)  # fmt: skip
def transcribe(
    options: dict[str, Any], words: tuple[str, ...], output: Path | None, form: str | None, **asked: Any
) -> None:
    """Write down what is said in audio files."""
    files = [Path(word) for word in words]
    if words and "model" not in options and (files[0].is_dir() or (not files[0].exists() and is_stored(words[0]))):
        set_model(options, words[0])
        files.pop(0)
    if "model" not in options:
        raise ConfigError("give a model that hears, as the first argument or by --model", param="model")
    if not files:
        raise BadRequest("give an audio file", param="file")
    targets = _targets(files, output, form)
    known = {name: value for name, value in asked.items() if value is not None}
    for paths in (files[at : at + TOGETHER] for at in range(0, len(files), TOGETHER)):
        _check(paths)
    _run(to_engine(options), files, targets, known)


def _check(paths: Sequence[Path]) -> None:
    """`BadRequest` for files that are not there, before minutes of loading."""
    for path in paths:
        if not path.is_file():
            raise BadRequest(f"{path}: no such file", param="file")


def _run(
    config: EngineConfig, files: Sequence[Path], targets: Sequence[tuple[Path | None, str]], known: Mapping[str, Any]
) -> None:
    """Transcribe the files, some of them at a time, and write what was said."""
    from quire.audio.decoding import AudioLimits
    from quire.core.progress import stage

    limits = AudioLimits(bytes=1 << 30, seconds=config.media.max_audio_seconds)
    with open_llm(config) as llm, stage("transcribing", len(files)) as at:
        for start in range(0, len(files), TOGETHER):
            paths = [str(path) for path in files[start : start + TOGETHER]]
            done = dict.fromkeys(range(len(paths)), 0.0)

            def told(
                number: int, heard: Any, seconds: float, done: dict[int, float] = done, start: int = start
            ) -> None:
                done[number] = heard.seconds / max(seconds, 1e-9)
                at.update(start + sum(done.values()), note=f"{files[start + number].name}: {heard.seconds:.0f} s")

            found = llm.transcribe(paths, limits=limits, told=told, **known)
            for path, target, transcript in zip(files[start:], targets[start:], found, strict=False):
                _write(path, target, transcript, several=len(files) > 1)


def _targets(files: Sequence[Path], output: Path | None, form: str | None) -> list[tuple[Path | None, str]]:
    """Where the text of each file goes, None = standard output, and its format."""
    if output is None:
        return [(None, form or "text")] * len(files)
    if output.is_dir() or len(files) > 1:
        if not output.is_dir():
            raise ConfigError(f"--output {output}: several files need a folder that is there", param="output")
        made = [output / f"{path.stem}{FORMATS[form or 'text']}" for path in files]
        if (twice := next((each for i, each in enumerate(made) if each in made[:i]), None)) is not None:
            raise ConfigError(f"--output {output}: several files would be written to {twice}; write them one at a time",
                              param="output")  # fmt: skip
        return [(each, form or "text") for each in made]
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}", param="output")
    by_name = next((name for name, suffix in FORMATS.items() if suffix == output.suffix.lower()), "text")
    return [(output, form or by_name)]


def _write(path: Path, target: tuple[Path | None, str], found: Transcript, several: bool) -> None:
    """Write a text to its file, or print it."""
    place, form = target
    text = written(found, form)
    if place is not None:
        place.write_text(text, "utf-8")
        return
    if several and form != "json":
        print(f"=== {path}")
    sys.stdout.write(text)


def written(found: Transcript, form: str) -> str:
    """A transcript in one of `FORMATS`."""
    from quire.engine.speech.transcript import to_srt, to_vtt

    if form == "srt":
        return to_srt(found.segments)
    if form == "vtt":
        return to_vtt(found.segments)
    if form == "json":
        return json.dumps(asdict(found), ensure_ascii=False) + "\n"
    return found.text + "\n"
