"""`quire transcribe`: files to texts, subtitles and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from quire.audio.decoding import RATE
from quire.cli.app import app
from quire.engine.llm import LLM
from speech_models import write_speech

soundfile = pytest.importorskip("soundfile", reason="the extra 'audio' is not installed")
OPTIONS = ["--device", "cpu", "--num-blocks", "200", "--dtype", "float32", "--language", "de", "--temperature", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whisper")
    write_speech(made)
    for number, seconds in enumerate((3.0, 1.0)):
        sound = np.sin(np.arange(round(seconds * RATE)) / (5 + number)).astype(np.float32)
        soundfile.write(made / f"{number}.wav", 0.3 * sound, RATE)
    return made


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["transcribe", *args, *OPTIONS])


def test_texts_and_subtitles(folder: Path, tmp_path: Path) -> None:
    one, two = str(folder / "0.wav"), str(folder / "1.wav")
    with LLM(str(folder), device="cpu", num_blocks=200, dtype="float32") as llm:
        want = llm.transcribe([one, two], language="de", temperature=0.0)
    assert want[0].segments
    printed = run(str(folder), one)
    assert printed.exit_code == 0 and printed.stdout == want[0].text + "\n", printed.output
    assert run(str(folder), one, "-o", str(tmp_path / "a.srt")).exit_code == 0
    assert (tmp_path / "a.srt").read_text().startswith("1\n00:00:")
    assert run("--model", str(folder), one, two, "-o", str(tmp_path), "--format", "json").exit_code == 0
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert [each["text"] for each in found] == [each.text for each in want]
    assert found[0]["segments"][0]["tokens"] == list(want[0].segments[0].tokens)
    timed = json.loads(run(str(folder), one, "--format", "json", "--word-timestamps").stdout)["segments"]
    assert [each["text"] for each in timed] == [each["text"] for each in found[0]["segments"]]
    assert timed[0]["words"] and not found[0]["segments"][0]["words"]
    both = run(str(folder), one, two)
    assert both.stdout == f"=== {one}\n{want[0].text}\n=== {two}\n{want[1].text}\n"


def test_what_cannot_be_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.wav").write_bytes(b"RIFF1234")
    one = str(folder / "0.wav")
    for args, told in (
        ((one,), "a model that hears"), ((str(folder),), "audio file"), ((str(folder), "/nowhere.wav"), "no such file"),
        ((str(folder), one, one, "-o", str(tmp_path / "no")), "folder"),
        ((str(folder), str(tmp_path / "broken.wav")), "broken.wav: the audio cannot be read"),
        ((str(folder), one, one, "-o", str(tmp_path)), "several files would be written to"),
    ):  # fmt: skip
        failed = run(*args)
        assert failed.exit_code != 0 and told in failed.output + str(failed.exception), (args, failed.output)
