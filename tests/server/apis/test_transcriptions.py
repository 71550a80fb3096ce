"""Texts of audio files over HTTP: OpenAI's client, all formats, streams, broken files, forms."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from live_server import LiveServer
from quire.audio.decoding import RATE, AudioLimits
from quire.core.config import flat_config
from quire.core.errors import BadRequest
from quire.engine.llm import LLM
from quire.server.http.multipart import parse
from quire.server.server_options import ServerOptions
from quire.text.tokenizer import Tokenizer
from real_server import Shared, real
from speech_models import write_speech
from stub_engine import StubEngine

soundfile = pytest.importorskip("soundfile", reason="the extra 'audio' is not installed")
PATH = "/v1/audio/transcriptions"
GOOD = {"temperature": "0.01", "seed": "3", "language": "en"}
OPTIONS: dict[str, Any] = {"num_blocks": 200, "device": "cpu", "dtype": "float32", "max_audio_seconds": 30.0}


def sound(seconds: float, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * 300 * np.arange(round(seconds * RATE)) / RATE)
    return (0.3 * tone + 0.05 * rng.standard_normal(len(tone))).astype(np.float32)


def file_of(samples: Any, form: str = "WAV") -> bytes:
    data = io.BytesIO()
    soundfile.write(data, samples, RATE, format=form, subtype="FLOAT" if form == "WAV" else None)
    return data.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whisper")
    write_speech(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    config = flat_config(model=str(folder), served_model_name=["whisper-1"], **OPTIONS)
    tools = cast(Any, (Tokenizer.from_folder(folder), None))
    server = LiveServer(cast(StubEngine, Shared(config)), ServerOptions(port=0), config, tools)
    server.start()
    yield server
    server.stop()


def asked(server: LiveServer, data: bytes, path: str = PATH, name: str = "a.wav", **fields: Any) -> Any:
    return server.http.post(path, files={"file": (name, data)}, data=GOOD | fields)


def test_all_formats_say_the_same(server: LiveServer, folder: Path) -> None:
    samples = sound(5.0)
    with LLM(str(folder), **OPTIONS) as llm:
        want = llm.transcribe(samples, language="en", temperature=0.01, seed=3)
    data = file_of(samples)
    verbose = asked(server, data, response_format="verbose_json").json()
    assert want.segments and verbose["text"] == want.text and verbose["duration"] == 5.0
    assert (verbose["task"], verbose["language"]) == ("transcribe", "english")
    assert [(s["start"], s["end"], s["text"], s["tokens"]) for s in verbose["segments"]] == [
        (s.start, s.end, s.text, list(s.tokens)) for s in want.segments
    ]
    assert asked(server, data).json() == {"text": want.text, "usage": {"seconds": 5, "type": "duration"}}
    assert asked(server, data, response_format="text").text == want.text + "\n"
    srt, vtt = (asked(server, data, response_format=form).text for form in ("srt", "vtt"))
    assert srt.startswith("1\n00:00:0") and srt.count(" --> ") == vtt.count(" --> ") == len(want.segments)
    assert vtt.startswith("WEBVTT\n\n")
    assert asked(server, file_of(samples, "FLAC")).json()["text"]
    translated = asked(server, data, "/v1/audio/translations", response_format="verbose_json").json()
    assert translated["task"] == "translate"


def test_a_stream_has_deltas_and_an_end(server: LiveServer) -> None:
    data = file_of(sound(5.0))
    whole = asked(server, data).json()["text"]
    reply = asked(server, data, stream="true")
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [e["type"] for e in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1) and len(events) > 2
    assert events[-1] == {"type": "transcript.text.done", "text": whole, "usage": {"seconds": 5, "type": "duration"}}
    assert "".join(e["delta"] for e in events[:-1]).strip() == whole


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_openais_client(server: LiveServer) -> None:
    with server.openai() as client:
        audio = client.audio
        data = file_of(sound(3.0))
        verbose = audio.transcriptions.create(
            model="whisper-1", file=("a.wav", data), response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert verbose.segments and verbose.duration == 3.0 and verbose.language in ("english", "german", "french")
        for times in (["word"], ["segment", "word"]):
            timed = audio.transcriptions.create(
                model="whisper-1", file=("a.wav", data), response_format="verbose_json", timestamp_granularities=times
            )
            assert timed.words and bool(timed.segments) == ("segment" in times)
            assert all(0 <= word.start <= word.end <= 4.0 for word in timed.words)
        assert audio.translations.create(model="whisper-1", file=("a.wav", data)).text is not None
        stream = audio.transcriptions.create(model="whisper-1", file=("a.wav", data), stream=True)
        assert [event.type for event in stream][-1] == "transcript.text.done"


def test_requests_at_once_get_the_texts_they_get_alone(server: LiveServer) -> None:
    files = [file_of(sound(seconds, seed)) for seed, seconds in enumerate((2.0, 5.0, 3.5, 1.0, 4.0))]
    alone = [asked(server, data).json()["text"] for data in files]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda data: asked(server, data).json()["text"], files)) == alone


def test_what_cannot_be_is_a_400(server: LiveServer) -> None:
    good, rng = file_of(sound(1.0)), np.random.default_rng(0)
    flac = file_of(sound(1.0), "FLAC")
    read = 0
    for number in range(60):
        data = bytearray((good, flac)[number % 2])
        data = data[: rng.integers(0, len(data))] if number % 3 else data
        for at in rng.integers(0, min(len(data), 100) or 1, 6 if data else 0):
            data[at] = rng.integers(256)
        reply = asked(server, bytes(data))
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert reply.json()["error"]["param"] == "file"
        read += reply.status_code == 200
    assert read < 60
    assert "longer than the 30 s" in asked(server, file_of(np.zeros(31 * RATE, np.float32), "FLAC")).text
    for fields, told in (
        ({"response_format": "docx"}, "response_format"), ({"language": "xx"}, "language"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": "9"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"), ({"seed": "a"}, "seed"),
        ({"timestamp_granularities[]": "page", "response_format": "verbose_json"}, "timestamp_granularities"),
    ):  # fmt: skip
        reply = asked(server, good, **fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == told, reply.text
    assert asked(server, good, model="other").status_code == 404
    assert server.http.post(PATH, data=GOOD).status_code == 415
    assert server.http.post(PATH, json={"file": "a"}).status_code == 415
    assert server.http.post(PATH, files={"other": b"a"}).json()["error"]["param"] == "file"
    assert "include" in asked(server, good, include="logprobs").headers["warning"]
    text = server.http.post("/v1/completions", json={"prompt": "a"})
    assert text.status_code == 400 and "reads audio" in text.text
    assert server.service.audio_seconds == 0.0


@pytest.mark.slow
def test_200_broken_files_are_refused_with_the_reason_or_give_their_text(server: LiveServer, folder: Path) -> None:
    """Each as `LLM.transcribe` has it, which reads the same bytes without a server."""
    rng, good = np.random.default_rng(7), [file_of(sound(1.0), form) for form in ("WAV", "FLAC", "OGG", "MP3")]
    read = refused = 0
    with LLM(str(folder), **OPTIONS) as llm:
        for number in range(200):
            data = bytearray(good[number % 4])
            if number % 3 == 0:
                data = data[: rng.integers(1, len(data))]
            for at in rng.integers(0, min(len(data), 200 if number % 2 else len(data)), 8):
                data[at] = rng.integers(256)
            reply = asked(server, bytes(data))
            try:
                want = llm.transcribe(bytes(data), limits=AudioLimits(seconds=30.0), language="en", temperature=0.01,
                                      seed=3)  # fmt: skip
            except BadRequest as error:
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file"), (number, reply.text)
                assert error.message in reply.json()["error"]["message"]
                refused += 1
                continue
            assert reply.status_code == 200 and reply.json()["text"] == want.text, (number, reply.text)
            read += 1
    assert read > 20 and refused > 20 and read + refused == 200
    assert asked(server, good[0]).status_code == 200 and server.service.audio_seconds == 0.0


def test_a_model_of_text_takes_no_audio() -> None:
    with real(num_blocks=64, max_model_len=32) as server:
        reply = asked(server, b"RIFF")
        assert reply.status_code == 400 and "takes no audio" in reply.text


def test_forms() -> None:
    body = (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x\r\ncontent-disposition: form-data; '
            b'name="file"; filename="b.wav"\r\nContent-Type: audio/wav\r\n\r\n\x00\r\n\xff\r\n--x--\r\n')  # fmt: skip
    form = parse(body, "multipart/form-data; boundary=x")
    assert (form.fields, form.files) == ({"a": ["1"]}, {"file": b"\x00\r\n\xff"})
    for data, kind in (
        (body, "multipart/form-data"), (body[:-8], "multipart/form-data; boundary=x"), (b"", "a; boundary=x"),
        (b"--x\r\n\r\n1\r\n--x--", "a; boundary=x"), (body.replace(b'"a"', b'"file"; filename=c'), "a; boundary=x"),
        (b'--x\r\ncontent-disposition: a; name="a"\r\n\r\n1\r\n' * 65 + b"--x--", "a; boundary=x"),
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            parse(data, kind)
