"""What was said, in segments with times, and files that hold it: SubRip, WebVTT."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it stands in its text, with what punctuates it, from `start` to `end` seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a text, from `start` to `end` seconds. `seek`: the frame of 10 ms where its window begins.

    `avg_logprob`: of the window's tokens, `compression_ratio` of its text; `no_speech_prob`: how likely nothing is said
    in the window, 0 where the text left no doubt. `words`: where their times were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()

    def fields(self) -> dict[str, Any]:
        """What replies have of it, but for its words, which they have beside."""
        return {name: value for name, value in asdict(self).items() if name != "words"}


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that was said. `language`: its code; `duration`: seconds of sound; `tokens`: how many were made for it."""

    text: str
    language: str
    duration: float
    segments: tuple[Segment, ...]
    task: str = "transcribe"
    tokens: int = 0

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments."""
        return tuple(word for each in self.segments for word in each.words)


def clock(seconds: float, point: str, hours: bool = True) -> str:
    """hh:mm:ss and milliseconds behind `point`."""
    whole = max(0, round(seconds * 1000))
    minutes, rest = divmod(whole, 60_000)
    hour, minute = divmod(minutes, 60)
    begin = f"{hour:02d}:" if hours or hour else ""
    return f"{begin}{minute:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _lines(text: str) -> str:
    """A text that ends no cue: blank lines and arrows would."""
    return " ".join(text.split()).replace("-->", "->")


def to_srt(segments: Iterable[Segment]) -> str:
    """The segments as SubRip."""
    return "".join(
        f"{number}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_lines(each.text)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def to_vtt(segments: Iterable[Segment]) -> str:
    """The segments as WebVTT."""
    cues = (
        f"{clock(each.start, '.', False)} --> {clock(each.end, '.', False)}\n{_lines(each.text)}\n\n"
        for each in segments
    )
    return "WEBVTT\n\n" + "".join(cues)
