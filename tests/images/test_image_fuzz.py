"""A thousand broken images: each is a refusal with a reason or an image, in bounded memory and time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paths import SUPPORT


def fuzz(count: int, seed: int) -> str:
    """In a process of its own, whose crash would be seen and whose memory is its own."""
    code = f"import image_fuzz; image_fuzz.read_all({count}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], cwd=SUPPORT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_broken_images() -> None:
    print(fuzz(60, 1))


@pytest.mark.slow
def test_a_thousand_broken_images() -> None:
    print(fuzz(1000, 0))
