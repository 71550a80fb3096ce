"""A minute and then an hour of silence through `LLM.transcribe` in a process of its own, and the memory they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quire.audio.decoding import RATE
from quire.audio.log_mel import HOP

HOUR = 3600
BINS = 80
ALLOWED = (HOUR - 60) * (4 * RATE + 4 * BINS * RATE // HOP) + (100 << 20)
"""Bytes that an hour may take more than a minute: its samples and spectrogram in f32, and 100 MB."""
_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from quire import LLM

with LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks=200) as llm:
    for seconds in map(int, sys.argv[2:]):
        found = llm.transcribe(np.zeros(16_000 * seconds, np.float32))
        assert (found.text, found.segments, found.duration) == ("", (), seconds), found
        print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
"""


def peaks_by_llm(folder: Path) -> tuple[int, int]:
    """The most bytes that the process had after a minute, and after an hour; both are empty texts."""
    command = [sys.executable, "-c", _SCRIPT, str(folder), "60", str(HOUR)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    minute, hour = (int(line) << 10 for line in done.stdout.split())
    return minute, hour
