"""Whisper tiny.en's real weights write down what faster-whisper and transformers do, and silence as nothing:
`make real`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import WhisperForConditionalGeneration

from paths import SUPPORT
from quire.audio.decoding import RATE
from quire.audio.log_mel import SECONDS, log_mel
from quire.audio.resampling import Samples
from quire.bench.suite.environments import FASTER_WHISPER
from quire.engine.llm import LLM
from real_figures import note
from real_speech import SPOKEN, read_aloud, spoken, word_errors, words
from real_weights import real_folder, tool
from silence import ALLOWED, HOUR, peaks_by_llm

pytestmark = pytest.mark.real
GREEDY: dict[str, Any] = {"temperature": 0.0, "compression_ratio_threshold": None, "logprob_threshold": None,
                          "no_speech_threshold": None, "condition_on_previous_text": False}  # fmt: skip
Parts = list[tuple[float, float, str]]
"""Segments: where they begin and end in seconds, and their texts."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(real_folder("whisper-tiny.en")), device="cpu", dtype="float32") as made:
        yield made


def sound(name: str, folder: Path) -> tuple[Samples, str]:
    """Samples, and what was said."""
    return (spoken(folder), " ".join(SPOKEN)) if name == "espeak-ng" else read_aloud()


def of_faster_whisper(samples: Samples, folder: Path) -> Parts:
    """Return faster-whisper's segments.

    A sound that is shorter than a window is followed by silence here, as in transformers and in ours: of itself
    faster-whisper has zeros follow its spectrogram, which is another sound to the model.
    """
    np.save(folder / "samples.npy", np.pad(samples, (0, max(0, SECONDS * RATE - len(samples)))))
    env, script = tool("faster_whisper"), SUPPORT / "real_transcripts.py"
    command = [env.python, str(script), str(real_folder("whisper-tiny.en-ct2")), str(folder / "samples.npy")]
    done = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return [(start, end, text) for start, end, text in json.loads(done.stdout)]


def of_transformers(samples: Samples, llm: LLM) -> Parts:
    """Return transformers' segments."""
    oracle = WhisperForConditionalGeneration.from_pretrained(real_folder("whisper-tiny.en")).eval()
    features = torch.from_numpy(log_mel(samples, 80).T.copy())[None]
    with torch.inference_mode():
        found = oracle.generate(
            features, attention_mask=torch.ones(1, features.shape[-1], dtype=torch.long), return_timestamps=True,
            return_segments=True, temperature=0.0, condition_on_prev_tokens=False,
        )["segments"][0]  # fmt: skip
    parts = [(round(float(s["start"]), 2), round(float(s["end"]), 2), text(llm, s["tokens"].tolist())) for s in found]
    return [(start, end, said) for start, end, said in parts if said.strip() and end > start]


def text(llm: LLM, tokens: list[int]) -> str:
    """The text of tokens, without times."""
    return llm._speech_vocabulary.text(tokens)


def joined(parts: Parts) -> str:
    return "".join(said for *_, said in parts).strip()


@pytest.mark.parametrize("name", ["espeak-ng", "readings"])
def test_words_are_those_of_other_tools(llm: LLM, tmp_path: Path, name: str) -> None:
    samples, said = sound(name, tmp_path)
    ours = llm.transcribe(samples, **GREEDY)
    found: Parts = [(s.start, s.end, s.text) for s in ours.segments]
    others = {"faster-whisper": of_faster_whisper(samples, tmp_path), "transformers": of_transformers(samples, llm)}
    right, heard = words(said), words(ours.text)
    note(f"speech {name}", {
        "seconds": len(samples) / RATE, "words": len(right), "word_errors": word_errors(heard, right),
        "segments": len(found), "text": ours.text,
        "beside": {
            other: {
                "same_words": words(joined(parts)) == heard, "same_text": joined(parts) == ours.text,
                "same_times": parts == found, "word_errors": word_errors(words(joined(parts)), right),
            } for other, parts in others.items()
        },
        "faster_whisper": FASTER_WHISPER, "transformers": transformers.__version__,
    })  # fmt: skip
    assert len(heard) > 0.8 * len(right)
    for parts in others.values():
        assert words(joined(parts)) == heard
    assert found == others["transformers"]


def test_an_hour_of_silence_is_an_empty_text() -> None:
    minute, hour = peaks_by_llm(real_folder("whisper-tiny.en"))
    note("silence", {"seconds": HOUR, "text": "", "peak_bytes": hour, "peak_bytes_of_a_minute": minute,
                     "allowed_bytes": ALLOWED})  # fmt: skip
    assert 4 * RATE * HOUR < hour - minute < ALLOWED
