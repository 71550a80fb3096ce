"""The lines of a flight recording: what an engine was asked and what it gave, a JSON object each (`quire replay`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import FinishReason, Request
from quire.engine.client import EngineInfo

FORMAT = 1
FILE = re.compile(r"(?P<run>\d{8}T\d{6}-\d+)-(?P<number>\d{6})\.jsonl")
"""Names of files: UTC time at which the run began, process, number within the run. They sort by time."""


class RunLine(msgspec.Struct, tag="run", frozen=True, kw_only=True):
    """The first line of every file: who recorded, and with what. `prompts`: whether tokens are told.

    `adapters`: folders of the LoRA adapters that were loaded beside or in the place of the options' own; "" = unloaded.
    """

    format: int
    version: str
    prompts: bool
    config: EngineConfig
    info: EngineInfo
    adapters: dict[str, str] = {}


class RequestLine(msgspec.Struct, tag="request", frozen=True, kw_only=True):
    """A request was handed over, `at` seconds after the run began. Its `arrival` counts from there, too.

    Its salt is a digest. Without prompts all that repeats a part of one, or of an answer, is gone from it as well.
    Pixels never are there: an image takes as much as thousands of prompts, and would push out what went before.
    """

    at: float
    prompt_tokens: int
    request: Request


class EndLine(msgspec.Struct, tag="end", frozen=True, kw_only=True):
    """A sequence ended after `count` tokens; "abort": the edge ended it, by a stop string or because nobody waits."""

    at: float
    id: str
    index: int
    reason: FinishReason
    count: int
    tokens: tuple[int, ...] | None = None


class AdapterLine(msgspec.Struct, tag="adapter", frozen=True, kw_only=True):
    """A LoRA adapter was loaded from `folder`, or unloaded (""), as was asked for `at` that time."""

    at: float
    name: str
    folder: str


class LostLine(msgspec.Struct, tag="lost", frozen=True, kw_only=True):
    """Note that so many lines are missing here: the disk was too slow, or they were too long."""

    lines: int


Line = RunLine | RequestLine | EndLine | AdapterLine | LostLine


def without_content(request: Request) -> Request:
    """`request` without its prompt and what else may be of people's words."""
    params: SamplingParams = replace(
        request.params, stop=(), bad_words=(), logit_bias={}, allowed_token_ids=None, structured_outputs=None
    )
    return replace(request, prompt=(), images=(), bad_words_ids=(), params=params, grammar="", completion=())


def without_pixels(request: Request) -> Request:
    """`request` with what else is known of its images: size, rows, digest."""
    if not request.images:
        return request
    return replace(request, images=tuple(replace(image, pixels=b"") for image in request.images))


@dataclass
class RecordedRun:
    """What the files of one run say, in order. `ends`: by request and index; `lost`: lines that are not there."""

    name: str
    began: RunLine
    asked: list[RequestLine] = field(default_factory=list)
    ends: dict[tuple[str, int], EndLine] = field(default_factory=dict)
    changes: list[AdapterLine] = field(default_factory=list)
    lost: int = 0


def runs(folder: Path) -> dict[str, list[Path]]:
    """The files of each run in `folder`, both in order of time; `ConfigError` when there is none."""
    found: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            if match := FILE.fullmatch(path.name):
                found.setdefault(match["run"], []).append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{folder}: holds no recording; `quire serve --record {folder}` makes one")
    return found


def read_run(folder: Path, name: str = "") -> RecordedRun:
    """The run of that name, or the last one; `ConfigError` naming what is wrong with a file."""
    known = runs(folder)
    if name and name not in known:
        raise ConfigError(f"--run {name}: not in {folder}; there are {', '.join(known)}", param="run")
    name = name or list(known)[-1]
    found: RecordedRun | None = None
    for path in known[name]:
        for line in _lines(path):
            if isinstance(line, RunLine):
                found = found or RecordedRun(name, line)
            elif found is None:
                raise ConfigError(f"{path}: does not begin as a recording does")
            else:
                _take(found, line)
    if found is None:
        raise ConfigError(f"{folder}: the run {name} has no line that is whole")
    return found


def _take(run: RecordedRun, line: RequestLine | EndLine | AdapterLine | LostLine) -> None:
    if isinstance(line, RequestLine):
        run.asked.append(line)
    elif isinstance(line, EndLine):
        run.ends[line.id, line.index] = line
    elif isinstance(line, AdapterLine):
        run.changes.append(line)
    else:
        run.lost += line.lines


def _lines(path: Path) -> list[Line]:
    """The lines of a file; the last may have been cut when the recorder was."""
    decoder = msgspec.json.Decoder(Line)
    found: list[Line] = []
    whole, *_ = path.read_bytes().rpartition(b"\n")
    for number, data in enumerate(whole.splitlines(), 1):
        try:
            line: Line = decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if isinstance(line, RunLine) and line.format != FORMAT:
            raise ConfigError(f"{path}: a recording of format {line.format}; this quire reads format {FORMAT}")
        found.append(line)
    return found
