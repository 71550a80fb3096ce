"""An hour of silence is an empty text, by `LLM.transcribe` and over HTTP, and takes memory for its samples and its
spectrogram."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

from quire.audio.decoding import RATE
from serving_process import Serving
from silence import ALLOWED, HOUR, peaks_by_llm
from speech_models import write_speech

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whisper")
    write_speech(made)
    return made


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


def test_by_llm(folder: Path) -> None:
    minute, hour = peaks_by_llm(folder)
    assert 4 * RATE * HOUR < hour - minute < ALLOWED


def test_over_http(folder: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    peaks = []
    words = (str(folder), "--device", "cpu", "--dtype", "float32", "--num-blocks", "200")
    with Serving(*words) as server, server.up() as client:
        for seconds in (60, HOUR):
            file = io.BytesIO()
            soundfile.write(file, np.zeros(RATE * seconds, np.int16), RATE, format="FLAC")
            reply = client.post("/v1/audio/transcriptions", files={"file": ("a.flac", file.getvalue())},
                                data={"response_format": "verbose_json"}, timeout=600)  # fmt: skip
            assert reply.status_code == 200, reply.text
            found = reply.json()
            assert (found["text"], found["segments"], found["duration"]) == ("", [], seconds)
            peaks.append((peak(server.process.pid), peak(server.engine)))
    for minute, hour in zip(*peaks, strict=True):
        assert hour - minute < ALLOWED
    assert peaks[1][0] - peaks[0][0] > 4 * RATE * HOUR, "the server is where the samples are"
