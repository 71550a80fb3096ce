"""A text of any length of sound, window by window, as openai/whisper and transformers go about it.

Nothing here runs a model: the generator `transcribe` asks for tokens, and whoever drives it answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quire.audio.log_mel import HOP, Mel, window_at
from quire.core.alignment import Alignment
from quire.core.audio import PromptAudio
from quire.core.errors import BadRequest
from quire.core.speech import SpeechRules
from quire.engine.speech.transcript import Segment, Transcript
from quire.engine.speech.vocabulary import SpeechVocabulary
from quire.engine.speech.words import WordTimes

FRAMES_A_SECOND = 16_000 // HOP
TICK = 0.02
"""Seconds between two tokens that are times."""
FRAMES_A_TICK = round(TICK * FRAMES_A_SECOND)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FORGETFUL = 0.5
"""Temperatures above this give texts that the next window is not told of."""


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    """How a text is made. `language`: a code or an English name, None = as the first window sounds. `prompt`: a text
    that comes before, for names and style. `timestamps`: segments have times, and windows end where a sentence does.

    A window is tried at each of `temperatures` until its text compresses to no less than 1 /
    `compression_ratio_threshold` and its tokens' mean log-probability is `logprob_threshold` or more. One that remains
    below that, and is silent with a probability above `no_speech_threshold`, is left out. None turns each of these off.
    `condition_on_previous_text`: a window is told what was said before. `word_timestamps`: segments say when each word
    was said; texts and times of segments are the same with and without.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str | None = None
    timestamps: bool = True
    temperatures: tuple[float, ...] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    word_timestamps: bool = False
    seed: int = 0

    def validate(self) -> None:
        """`BadRequest` for temperatures that cannot be."""
        if not self.temperatures or not all(0.0 <= t <= 2.0 for t in self.temperatures):
            raise BadRequest("temperature: must lie in [0, 2]", param="temperature")


class Ask(NamedTuple):
    """Tokens that are wanted of a window: behind `opening`, drawn at `temperature`. `among`: one token of these.
    `alignment`: no tokens, but when those of `opening` were said."""

    audio: PromptAudio
    opening: tuple[int, ...]
    rules: SpeechRules | None
    temperature: float = 0.0
    seed: int = 0
    among: tuple[int, ...] = ()
    alignment: Alignment | None = None


class WindowTokens(NamedTuple):
    """Tokens, the one that ended the text included, and their log-probabilities; or, of an alignment, the rows of the
    encoder's output where tokens begin."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rows: tuple[int, ...] = ()


class Heard(NamedTuple):
    """What was found in a window, and seconds of sound that are done."""

    segments: tuple[Segment, ...]
    seconds: float


class _Try(NamedTuple):
    """What one temperature gave."""

    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    silent: bool


Asking = Generator["Ask | Heard", "WindowTokens | None", Transcript]


class Transcription:
    """One sound that becomes a text. `mel` [frames, bins], of which `content` frames are sound; `size`: frames of a
    window; `positions`: of the decoder."""

    def __init__(
        self, mel: Mel, content: int, vocabulary: SpeechVocabulary, options: SpeechOptions, sizes: tuple[int, int]
    ) -> None:
        options.validate()
        self._mel, self._content, self._vocabulary, self._options = mel, content, vocabulary, options
        self._size, self._positions = sizes
        self._rules = vocabulary.rules(options.timestamps)
        self._language = vocabulary.language(options.language)
        vocabulary.opening(self._language or next(iter(vocabulary.languages), "en"), options.task, options.timestamps)
        self._history = self._prompt(options.prompt)
        self._made = self._asked = 0
        self._words: WordTimes | None = None

    def _prompt(self, text: str | None) -> list[int]:
        """Tokens of a text that comes before."""
        if not text or not text.strip():
            return []
        if self._vocabulary.previous < 0:
            raise BadRequest("prompt: this model's tokenizer has no token that begins one", param="prompt")
        return self._vocabulary.tokenizer.encode(f" {text.strip()}", False, special=False)

    def run(self) -> Asking:
        """Ask for tokens until all of the sound is a text."""
        segments, seek = list[Segment](), 0
        while seek < self._content:
            frames = min(self._size, self._content - seek)
            if not np.ptp(self._mel[seek : seek + frames]):  # nothing is above the floor, and a model makes up words
                seek += frames
                yield Heard((), seek / FRAMES_A_SECOND)
                continue
            if self._language is None:
                self._language = yield from self._detected(seek)
            end = len(self._mel) if self._content <= self._size and not seek else self._content
            audio = PromptAudio.of(window_at(self._mel, seek, end, self._size))
            found, begins = yield from self._window(audio)
            more, step = ([], frames) if found.silent else self._segments(found, seek, frames)
            self._remember(found, begins, more)
            if self._options.word_timestamps and more:
                more = yield from self._timed(audio, more, frames)
            said = (each for each in more if each.text.strip() and each.end > each.start)
            shown = [replace(each, id=number) for number, each in enumerate(said, len(segments))]
            segments += shown
            seek += max(1, step)
            yield Heard(tuple(shown), min(seek, self._content) / FRAMES_A_SECOND)
        text = "".join(each.text for each in segments).strip()
        return Transcript(
            text, self._language or "", self._content / FRAMES_A_SECOND, tuple(segments), self._options.task, self._made
        )

    def _detected(self, seek: int) -> Generator[Ask | Heard, WindowTokens | None, str]:
        """The language of the first window with a sound, at `seek`: the likeliest token of one behind the first."""
        codes = self._vocabulary.codes
        if not codes:
            return "en"
        end = len(self._mel) if self._content <= self._size else self._content
        audio = PromptAudio.of(window_at(self._mel, seek, end, self._size))
        answer = yield from self._ask(Ask(audio, (self._vocabulary.start,), None, among=tuple(codes)))
        return codes[answer.tokens[0]]

    def _ask(self, ask: Ask) -> Generator[Ask | Heard, WindowTokens | None, WindowTokens]:
        answer = yield ask
        assert answer is not None, "whoever drives a transcription answers what it asks"
        self._made += len(answer.tokens)
        return answer

    def _window(self, audio: PromptAudio) -> Generator[Ask | Heard, WindowTokens | None, tuple[_Try, tuple[int, ...]]]:
        """The text of a window by the first temperature that gives a good one, else by the last."""
        options, vocabulary = self._options, self._vocabulary
        before = tuple(self._history[-(self._positions // 2 - 1) :])
        begins = (vocabulary.previous, *before) if before else ()
        begins += vocabulary.opening(self._language or "en", options.task, options.timestamps)
        no_speech, found = -1.0, None
        for temperature in options.temperatures:
            self._asked += 1
            answer = yield from self._ask(
                Ask(audio, begins, self._rules, temperature, (options.seed + 0x9E3779B97F4A7C15 * self._asked) >> 1)
            )
            tokens = [*answer.tokens]
            if tokens and tokens[-1] == vocabulary.end:
                tokens.pop()
            mean = sum(answer.logprobs) / max(1, len(answer.logprobs))
            ratio = compression_ratio(vocabulary.text(tokens))
            unlikely = options.logprob_threshold is not None and mean < options.logprob_threshold
            repeats = options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold
            silent = False
            if unlikely and options.no_speech_threshold is not None:
                if no_speech < 0:
                    no_speech = yield from self._silence(audio)
                silent = no_speech > options.no_speech_threshold
            found = _Try(tokens, temperature, mean, ratio, max(0.0, no_speech), silent)
            if silent or not (unlikely or repeats):
                break
        assert found is not None, "there is at least one temperature"
        return found, begins

    def _timed(
        self, audio: PromptAudio, segments: list[Segment], frames: int
    ) -> Generator[Ask | Heard, WindowTokens | None, list[Segment]]:
        """The segments of a window of `frames` frames of sound with their words."""
        vocabulary, language = self._vocabulary, self._language or "en"
        if self._words is None:
            self._words = WordTimes(vocabulary.tokenizer, language)
        opening = vocabulary.opening(language, self._options.task, False)
        room = self._positions - len(opening) - 2  # the end, and a row that is answered
        parts = [[token for token in each.tokens if token < vocabulary.end] for each in segments]
        tokens = [token for part in parts for token in part][:room]
        rows = frames // FRAMES_A_TICK
        if not tokens or not rows:
            return segments
        asked = Alignment(heads=vocabulary.alignment_heads, first=len(opening) - 1, rows=rows)
        answer = yield from self._ask(Ask(audio, (*opening, *tokens, vocabulary.end), None, alignment=asked))
        starts = [row * TICK for row in answer.rows]
        starts += [starts[-1]] * (1 + sum(map(len, parts)) - len(starts))
        spans = [(each.start, each.end) for each in segments]
        words = self._words.add(parts, spans, starts, segments[0].seek / FRAMES_A_SECOND)
        return [replace(each, words=own) for each, own in zip(segments, words, strict=True)]

    def _silence(self, audio: PromptAudio) -> Generator[Ask | Heard, WindowTokens | None, float]:
        """How likely it is that nobody speaks."""
        from math import exp

        asked = Ask(audio, (self._vocabulary.start,), None, among=(self._vocabulary.no_speech,))
        answer = yield from self._ask(asked)
        return exp(answer.logprobs[0])

    def _segments(self, found: _Try, seek: int, frames: int) -> tuple[list[Segment], int]:
        """The segments of a window, and how many frames are done: up to the last time, behind which a sentence may
        have been cut, or all."""
        tokens, times = found.tokens, self._vocabulary.times
        offset = seek / FRAMES_A_SECOND
        is_time = [token >= times for token in tokens]
        cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        ends_once = is_time[-2:] == [False, True]
        if not self._options.timestamps or not cuts:
            last, seen = frames / FRAMES_A_SECOND, [token for token in tokens if token >= times]
            if seen and seen[-1] != times:
                last = (seen[-1] - times) * TICK
            return [self._segment(found, tokens, seek, (offset, offset + last))], frames
        if ends_once:
            cuts.append(len(tokens))
        made, first = list[Segment](), 0
        for cut in cuts:
            part = tokens[first:cut]
            span = tuple(offset + (part[at] - times) * TICK for at in (0, -1))
            made.append(self._segment(found, part, seek, (span[0], span[1])))
            first = cut
        return made, frames if ends_once else (tokens[first - 1] - times) * FRAMES_A_TICK

    def _segment(self, found: _Try, tokens: Sequence[int], seek: int, span: tuple[float, float]) -> Segment:
        """A segment, which has no number before it is known to be shown."""
        return Segment(
            0, seek, round(span[0], 3), round(span[1], 3), self._vocabulary.text(list(tokens)), tuple(tokens),
            found.temperature, found.avg_logprob, found.compression_ratio, found.no_speech_prob,
        )  # fmt: skip

    def _remember(self, found: _Try, begins: tuple[int, ...], segments: Sequence[Segment]) -> None:
        """What the next window is told."""
        if self._vocabulary.previous < 0:
            return
        if not self._options.condition_on_previous_text or found.temperature > FORGETFUL:
            self._history = []
        else:
            self._history += [token for each in segments for token in each.tokens]


def compression_ratio(text: str) -> float:
    """Bytes of a text over those of it compressed: large where it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
