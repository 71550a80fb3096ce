"""`LLM.transcribe`: texts of sounds, several at once, by the engine of this process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from quire.audio.decoding import RATE, AudioLimits, read_audio, read_audio_file, samples_of
from quire.audio.log_mel import HOP, log_mel
from quire.audio.resampling import Samples
from quire.core.errors import BadRequest, EngineFailure, told_error
from quire.core.params import SamplingParams
from quire.core.request import Output, Request, random_id
from quire.engine.client import EngineInfo
from quire.engine.requests import hearing, make_request
from quire.engine.speech.transcript import Transcript
from quire.engine.speech.vocabulary import SpeechVocabulary, speech_vocabulary
from quire.engine.speech.windows import Ask, Asking, Heard, SpeechOptions, Transcription, WindowTokens

if TYPE_CHECKING:
    from quire.engine.local import LocalEngine
    from quire.text.tokenizer import Tokenizer


LIMITS = AudioLimits()
Told = Callable[[int, Heard, float], object]
"""Called with the number of a sound, what was found in a window of it, and its seconds."""


def samples_given(audio: Any, rate: int, limits: AudioLimits) -> Samples:
    """One channel at 16 kHz of a path, the bytes of a file, or an array of samples at `rate`."""
    if isinstance(audio, (str, os.PathLike)):
        return read_audio_file(os.fspath(audio), limits)
    if isinstance(audio, (bytes, bytearray, memoryview)):
        return read_audio(bytes(audio), limits)
    return samples_of(audio, rate, limits)


def begin(info: EngineInfo, vocabulary: SpeechVocabulary, samples: Samples, options: SpeechOptions) -> Transcription:
    """The transcription of samples at 16 kHz by the model of `info`."""
    start = info.decoder_start
    assert start is not None, "a model with a vocabulary of speech has an encoder"
    size = 2 * start.rows
    mel = log_mel(samples, start.bins, size)
    return Transcription(mel, -(-len(samples) // HOP), vocabulary, options, (size, start.positions))


def request_of(info: EngineInfo, ask: Ask) -> Request:
    """The request for what a transcription asks."""
    params = SamplingParams(temperature=ask.temperature, logprobs=0, detokenize=False, max_tokens=None)
    if ask.among:
        params = replace(params, allowed_token_ids=list(ask.among), max_tokens=1, ignore_eos=True)
    if ask.alignment is not None:
        params = SamplingParams(temperature=0.0, detokenize=False, max_tokens=1)
    prompt = hearing(info, ask.audio, ask.opening)
    made = make_request(info, prompt, params, request_id=random_id(), seed=ask.seed & (1 << 63) - 1)
    if ask.alignment is not None:
        return replace(made, pooling="alignment", alignment=ask.alignment)
    return replace(made, speech=ask.rules)


def answer_of(output: Output) -> WindowTokens:
    """What the engine gave in all."""
    rows = np.frombuffer(output.pooled, np.float32).astype(int).tolist()
    return WindowTokens(tuple(output.tokens), tuple(entry.logprob for entry in output.logprobs), tuple(rows))


class _Open(NamedTuple):
    """A sound under way: its number, its generator, its seconds, and what came of its request."""

    number: int
    asking: Asking
    seconds: float
    came: Output


class SpeechCalls(ABC):
    """The calls of an `LLM` whose model hears."""

    info: EngineInfo

    @property
    @abstractmethod
    def engine(self) -> LocalEngine:
        """The engine."""

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @cached_property
    def _speech_vocabulary(self) -> SpeechVocabulary:
        return speech_vocabulary(self.info, self.get_tokenizer())

    def transcribe(
        self,
        audio: Any,
        *,
        sampling_rate: int = RATE,
        limits: AudioLimits = LIMITS,
        told: Told | None = None,
        **options: Any,
    ) -> Any:
        """What is said in `audio`: a `Transcript`, or a list of them for a list of sounds, which run at once.

        A sound is a path, the bytes of a file, or an array of samples [n] or [n, channels] at `sampling_rate`.
        `options`: those of `SpeechOptions` (language, task, prompt, timestamps, ...); `temperature` is a short form of
        one of `temperatures`, or of several. `told` is called after each window. `BadRequest` for what cannot be read.
        """
        several = isinstance(audio, (list, tuple)) and not (audio and isinstance(audio[0], (int, float)))
        sounds = list(audio) if several else [audio]
        vocabulary, asked = self._speech_vocabulary, speech_options(options)
        samples = [samples_given(each, sampling_rate, limits) for each in sounds]
        asking = [begin(self.info, vocabulary, each, asked).run() for each in samples]
        found = self._transcribe(
            asking, [len(each) / RATE for each in samples], told or (lambda number, heard, seconds: None)
        )
        return found if several else found[0]

    def _transcribe(self, asking: Sequence[Asking], seconds: Sequence[float], told: Told) -> list[Transcript]:
        """Drive the transcriptions until all are texts; their requests share steps."""
        done, live = dict[int, Transcript](), dict[str, _Open]()

        def go_on(number: int, answer: WindowTokens | None) -> None:
            try:
                step = asking[number].send(answer)
                while isinstance(step, Heard):
                    told(number, step, seconds[number])
                    step = asking[number].send(None)
            except StopIteration as end:
                done[number] = end.value
                return
            request = request_of(self.info, step)
            live[request.id] = _Open(number, asking[number], seconds[number], Output(request_id=request.id))
            self.engine.submit(request)

        try:
            for number in range(len(asking)):
                go_on(number, None)
            while live:
                report = self.engine.poll(0.0)
                if report is None:
                    raise EngineFailure(f"the engine stopped with {len(live)} requests unfinished")
                for output in report.outputs:
                    one = live.get(output.request_id)
                    if one is None:
                        continue
                    if output.finish_reason in ("error", "abort"):
                        raise told_error(output.error_kind, output.error or "aborted", output.error_param)
                    one.came.merge(output)
                    if output.finish_reason is not None:
                        del live[output.request_id]
                        go_on(one.number, answer_of(one.came))
        finally:
            for request_id in live:
                self.engine.abort(request_id)
        return [done[number] for number in range(len(asking))]


def speech_options(given: dict[str, Any]) -> SpeechOptions:
    """Options by name; `BadRequest` for one that there is not. `temperature`: a number, or several."""
    values = dict(given)
    if "temperature" in values:
        wanted = values.pop("temperature")
        values["temperatures"] = tuple(wanted) if isinstance(wanted, (list, tuple)) else (float(wanted),)
    try:
        return SpeechOptions(**values)
    except TypeError as error:
        raise BadRequest(f"transcribe: {error}") from None
