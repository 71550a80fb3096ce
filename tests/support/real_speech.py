"""Speech that real weights of Whisper are tried on: sentences by espeak-ng, and readings for LibriVox."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from quire.audio.decoding import RATE, read_audio_file
from quire.audio.resampling import Samples
from real_weights import real_folder

SPOKEN = (
    "Good morning, and welcome to the museum of science and technology.",
    "The first room shows how people measured time before there were clocks.",
    "In 1656, a Dutch scientist built the first clock with a pendulum.",
    "It lost only 15 seconds a day, which was a hundred times better than anything before it.",
    "The second room is about engines.",
    "This steam engine weighs 12 tons, and it pumped water out of a coal mine for 48 years.",
    "Please do not touch the machines, because some of them are still warm.",
    "On the third floor you will find the library, with 3000 books about the history of the railway.",
    "The restaurant is open from 11 in the morning until 6 in the evening.",
    "A cup of coffee costs 2 pounds and 50 pence, and children under 10 eat for free.",
    "If you have any questions, ask one of our guides, who wear blue shirts.",
    "The museum closes at half past seven, and we wish you a pleasant visit.",
)
"""A minute of sentences, some with numbers."""
SPEED = 150
"""Words a minute."""


def spoken(folder: Path) -> Samples:
    """`SPOKEN` by espeak-ng, at 16 kHz; the test is skipped where that is not installed."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is not installed: apt-get install espeak-ng")
    subprocess.run(
        [program, "-v", "en-us", "-s", str(SPEED), "-w", str(folder / "spoken.wav"), " ".join(SPOKEN)], check=True
    )
    return read_audio_file(folder / "spoken.wav")


def read_aloud() -> tuple[Samples, str]:
    """Five sentences of a novel with half a second between them, at 16 kHz, and what was said."""
    folder, pause = real_folder("readings"), np.zeros(RATE // 2, np.float32)
    files = sorted(folder.glob("*.wav"))
    assert len(files) == 5
    parts = [part for path in files for part in (read_audio_file(path), pause)]
    return np.concatenate(parts[:-1]), " ".join(path.with_suffix(".txt").read_text() for path in files)


def words(text: str) -> list[str]:
    """The words of a text in small letters, without punctuation."""
    return re.sub(r"[^\w\s]", "", text.lower()).split()


def word_errors(found: list[str], said: list[str]) -> int:
    """Words to insert, delete or replace to make `said` of `found` (Levenshtein)."""
    row = list(range(len(said) + 1))
    for i, word in enumerate(found, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]
