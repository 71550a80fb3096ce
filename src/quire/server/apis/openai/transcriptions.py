"""POST /v1/audio/transcriptions and /v1/audio/translations: OpenAI's shapes over a model that hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.audio.decoding import RATE, AudioLimits, read_audio
from quire.core.errors import BadRequest, Overloaded, QuireError
from quire.core.options.fields import about
from quire.core.request import Output
from quire.engine.speech.calls import answer_of, begin, request_of
from quire.engine.speech.languages import LANGUAGES
from quire.engine.speech.transcript import Segment, Transcript, Word, to_srt, to_vtt
from quire.engine.speech.windows import TEMPERATURES, Ask, Asking, Heard, SpeechOptions, Transcription, WindowTokens
from quire.server.apis.fields import ModelField
from quire.server.http.disconnect import ClientGone, cancel_on_disconnect
from quire.server.http.json_response import JsonResponse
from quire.server.http.multipart import Form, read_form
from quire.server.http.routes import SSE, Route
from quire.server.keys import Tenant
from quire.server.service import Service

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")
HELD = 4
"""Times the longest audio that requests in flight may have together."""


class TranscriptionForm(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the form."""

    file: Annotated[Any, about("The file: wav, flac, ogg or mp3, any rate and number of channels.")]
    model: ModelField = None
    language: Annotated[
        str | None, about("Language that is spoken, as en. By default, the first 30 seconds are asked.")
    ] = None
    prompt: Annotated[str | None, about("A text before the audio's, for its style and names.")] = None
    response_format: Annotated[str | None, about("json, text, srt, verbose_json or vtt. The default is json.")] = None
    temperature: Annotated[
        float | None, about("Temperature of sampling; 0, the default, tries higher ones where a text is not good.")
    ] = None
    timestamp_granularities: Annotated[
        list[str] | None, about("What verbose_json has times of: segment, word, or both. The default is segment.")
    ] = None
    stream: Annotated[bool | None, about("Send transcript.text.delta events, a window at a time.")] = None
    seed: Annotated[int | None, about("Seed of sampling at temperatures above 0.")] = None


class DurationUsage(msgspec.Struct, kw_only=True):
    """What the work is counted by: seconds of audio."""

    seconds: int
    type: str = "duration"


class TranscriptReply(msgspec.Struct, kw_only=True):
    """The text."""

    text: str
    usage: DurationUsage


class SegmentReply(msgspec.Struct, kw_only=True):
    """A part of the text with its times in seconds, and how sure it is."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordReply(msgspec.Struct, kw_only=True):
    """A word with its times in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscript(msgspec.Struct, kw_only=True):
    """The text, what was spoken, for how long, and the segments, the words, or both."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[SegmentReply] | UnsetType = UNSET
    words: list[WordReply] | UnsetType = UNSET
    usage: DurationUsage


class TextDelta(msgspec.Struct, kw_only=True):
    """A part of the text, as a window of audio is done."""

    delta: str
    type: str = "transcript.text.delta"


class TextDone(msgspec.Struct, kw_only=True):
    """The whole text."""

    text: str
    usage: DurationUsage
    type: str = "transcript.text.done"


async def create_transcription(service: Service, request: HttpRequest) -> Response:
    """Write down what is said in an audio file."""
    return await _answer(service, request, "transcribe")


async def create_translation(service: Service, request: HttpRequest) -> Response:
    """Write down in English what is said in an audio file."""
    return await _answer(service, request, "translate")


async def _answer(service: Service, request: HttpRequest, task: str) -> Response:
    service.speech  # noqa: B018  another model refuses before the body is read
    form = await read_form(request, service.options)
    asked, data = _fields(form, service.options.strict, request.state.ignored)
    service.check_model(asked.model)
    kind = asked.response_format or "json"
    transcription, seconds = await _opened(service, asked, task, data)
    request.state.exchange.model = service.answering(asked.model)
    work = _Work(service, transcription, seconds, request.state.tenant)
    if asked.stream:
        return _Stream(work)
    async with cancel_on_disconnect(request.receive):
        found = [step async for step in work.steps()][-1]
    assert isinstance(found, Transcript)
    return _written(found, kind, task, asked.timestamp_granularities or ["segment"])


def _fields(form: Form, strict: bool, ignored: list[str]) -> tuple[TranscriptionForm, bytes]:
    """The fields of a form, checked, and the file; unknown names are noted in `ignored`."""
    values: dict[str, Any] = {}
    for name, texts in form.fields.items():
        plain = name.removesuffix("[]")
        if plain not in TranscriptionForm.__struct_fields__ or plain == "file":
            if strict:
                raise BadRequest(f"{name}: this server knows no such field; it would have no effect", param=name[:200])
            ignored.append(name)
            continue
        if plain != "timestamp_granularities" and len(texts) > 1:
            raise BadRequest(f"{plain}: is given twice", param=plain)
        values[plain] = texts if plain == "timestamp_granularities" else texts[0]
    data = form.files.get("file")
    if data is None:
        raise BadRequest("file: required, an audio file", param="file")
    try:
        asked = msgspec.convert({"file": None, **values}, TranscriptionForm, strict=False)
    except msgspec.ValidationError as error:
        path = str(error).partition("$.")[2].strip("`")
        raise BadRequest(f"{path or 'the form'}: {str(error).partition(' - at')[0]}", param=path or None) from None
    if (asked.response_format or "json") not in FORMATS:
        raise BadRequest(f"response_format: must be one of {', '.join(FORMATS)}", param="response_format")
    if not {*(asked.timestamp_granularities or ())} <= {*GRANULARITIES}:
        raise BadRequest(
            f"timestamp_granularities: must be {' or '.join(GRANULARITIES)}", param="timestamp_granularities"
        )
    if asked.timestamp_granularities and asked.response_format != "verbose_json":
        raise BadRequest("timestamp_granularities: needs response_format verbose_json", param="timestamp_granularities")
    return asked, data


async def _opened(service: Service, asked: TranscriptionForm, task: str, data: bytes) -> tuple[Transcription, float]:
    """The transcription of a file, which is decoded in a thread, and its seconds; errors name the field."""
    temperature = asked.temperature or 0.0
    options = SpeechOptions(
        language=asked.language or None,
        task=task,
        prompt=asked.prompt,
        temperatures=(temperature,) if temperature else TEMPERATURES,
        word_timestamps="word" in (asked.timestamp_granularities or ()),
        seed=service.draw_seed() if asked.seed is None else asked.seed,
    )
    options.validate()
    service.speech.language(options.language)
    longest = service.config.media.max_audio_seconds
    limits = AudioLimits(bytes=service.options.max_body_bytes, seconds=longest)

    def opened() -> tuple[Transcription, float]:
        try:
            samples = read_audio(data, limits)
        except BadRequest as error:
            raise BadRequest(f"file: {error.message}", param="file") from None
        return begin(service.engine.info, service.speech, samples, options), len(samples) / RATE

    async with service.decoding:  # those that wait here are not counted yet
        if service.audio_seconds >= HELD * longest:
            raise Overloaded(f"{service.audio_seconds:.0f} s of audio are in flight; try again later", retry_after=10)
        return await asyncio.to_thread(opened)


class _Work:
    """A transcription that the engine works on; it counts its seconds as long as it runs."""

    def __init__(self, service: Service, transcription: Transcription, seconds: float, tenant: Tenant) -> None:
        self._service, self._seconds, self._tenant = service, seconds, tenant
        self._asking = transcription.run()

    async def steps(self) -> AsyncIterator[Heard | Transcript]:
        """What is found in each window, and the whole at the end."""
        service, answer = self._service, None
        service.audio_seconds += self._seconds
        try:
            while True:
                step = await asyncio.to_thread(_advance, self._asking, answer)
                if isinstance(step, Ask):
                    answer = await self._answered(step)
                    continue
                yield step
                answer = None
                if isinstance(step, Transcript):
                    return
        finally:
            service.audio_seconds -= self._seconds

    async def _answered(self, ask: Ask) -> WindowTokens:
        """What the engine gives for one request of it."""
        tenant = self._tenant
        made = await asyncio.to_thread(request_of, self._service.engine.info, ask)
        made = replace(made, cache_salt=tenant.salt, tenant=tenant.called(None), weight=tenant.weight)
        came = Output(request_id=made.id)
        async for output in self._service.engine.generate(made):
            came.merge(output)
        return answer_of(came)


def _advance(asking: Asking, answer: WindowTokens | None) -> Ask | Heard | Transcript:
    """The next step of a transcription, or its end."""
    try:
        return asking.send(answer)
    except StopIteration as end:
        found: Transcript = end.value
        return found


def _usage(found: Transcript) -> DurationUsage:
    return DurationUsage(seconds=-int(-found.duration // 1))


def _written(found: Transcript, kind: str, task: str, times: Sequence[str]) -> Response:
    """The reply in the format that was asked for; `times`: of what a verbose one has them."""
    if kind == "json":
        return JsonResponse(msgspec.json.encode(TranscriptReply(text=found.text, usage=_usage(found))))
    if kind == "verbose_json":
        reply = VerboseTranscript(
            task=task, language=LANGUAGES.get(found.language, found.language), duration=found.duration,
            text=found.text, usage=_usage(found),
            segments=[_segment(each) for each in found.segments] if "segment" in times else UNSET,
            words=[_word(each) for each in found.words] if "word" in times else UNSET,
        )  # fmt: skip
        return JsonResponse(msgspec.json.encode(reply))
    subtitles = {"srt": to_srt, "vtt": to_vtt}
    text = subtitles[kind](found.segments) if kind in subtitles else found.text + "\n"
    return Response(text, media_type="text/plain")


def _segment(segment: Segment) -> SegmentReply:
    return SegmentReply(**{**segment.fields(), "tokens": list(segment.tokens)})


def _word(word: Word) -> WordReply:
    return WordReply(word=word.word.strip(), start=word.start, end=word.end)


_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class _Stream(Response):
    """The text as windows are done. A failure before the first has its own status."""

    def __init__(self, work: _Work) -> None:
        super().__init__(status_code=200)
        self._work, self._said = work, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        started = False
        try:
            async with cancel_on_disconnect(receive):
                async for step in self._work.steps():
                    data = self._event(step)
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return
        except QuireError as error:
            if not started:
                raise
            end = scope["state"]["exchange"].dialect.event(error)
            await send({"type": "http.response.body", "body": end, "more_body": False})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, step: Heard | Transcript) -> bytes:
        """The event of one step."""
        if isinstance(step, Transcript):
            return _data(TextDone(text=step.text, usage=_usage(step)))
        text = "".join(each.text for each in step.segments)
        text = text if self._said else text.lstrip()
        self._said += text
        return _data(TextDelta(delta=text)) if text else b": silence\n\n"


def _data(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


_KINDS: dict[str, Any] = {
    "body": (TranscriptionForm,),
    "form": True,
    "reply": (TranscriptReply, VerboseTranscript),
    "text": True,
    "stream": SSE,
    "generates": True,
}
ROUTES = (
    Route("POST", "/v1/audio/transcriptions", create_transcription, **_KINDS),
    Route("POST", "/v1/audio/translations", create_translation, **_KINDS),
)
