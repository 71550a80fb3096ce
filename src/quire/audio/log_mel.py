"""Log-mel spectrograms as speech models read them (Radford et al. 2022), equal to transformers' feature extractor."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.audio.decoding import RATE
from quire.audio.resampling import Samples

FFT, HOP = 400, 160
"""Samples of a frame, and between the beginnings of two."""
SECONDS = 30
"""Of a window, which is what a model reads at once."""
FRAMES = SECONDS * RATE // HOP
AT_ONCE = 4096
"""Frames whose spectra exist at a time."""

Mel = NDArray[np.float32]


def hertz_of(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's scale: straight up to 1 kHz (15 mel), then by factors of 6.4 in 27 steps."""
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))


def mel_of(hertz: float) -> float:
    """Return the place on Slaney's scale of a frequency."""
    return float(hertz * 3 / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4))


@cache
def filters(bins: int) -> NDArray[np.float64]:
    """Triangles [FFT / 2 + 1, bins] over frequencies, each of the same area."""
    edges = hertz_of(np.linspace(0.0, mel_of(RATE / 2), bins + 2))
    at = np.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    made: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))
    return made


def log_mel(samples: Samples, bins: int, least: int = FRAMES) -> Mel:
    """The spectrogram [frames, bins] of samples at 16 kHz: a frame for each `HOP`, `least` of them or more.

    What is shorter is followed by silence. What lies 80 dB below the loudest is raised to that.
    """
    short = least * HOP - len(samples)
    if short > 0:
        samples = np.concatenate((samples, np.zeros(short, np.float32)))
    count = len(samples) // HOP
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)
    mel = np.empty((count, bins), np.float32)
    for start in range(0, count, AT_ONCE):
        some = slice(start, min(start + AT_ONCE, count))
        spectra = np.fft.rfft(_frames(samples, some) * window)
        power = spectra.real**2 + spectra.imag**2
        mel[some] = np.log10(np.maximum(power @ filters(bins), 1e-10))
    np.maximum(mel, mel.max() - np.float32(8), out=mel)
    mel += 4
    mel /= 4
    return mel


def _frames(samples: Samples, some: slice) -> Samples:
    """Some frames [n, FFT] of samples, which are mirrored at both ends."""
    first, stop = some.start * HOP - FFT // 2, (some.stop - 1) * HOP + FFT // 2
    before, behind = max(0, -first), max(0, stop - len(samples))
    part = np.pad(samples[max(0, first) : stop], (before, behind), mode="reflect")
    return np.lib.stride_tricks.sliding_window_view(part, FFT)[::HOP]


def window_at(mel: Mel, start: int, end: int, size: int = FRAMES) -> Mel:
    """Frames `start` to before `end`, at most `size` of them, with zeros behind fewer: [size, bins]."""
    made = np.zeros((size, mel.shape[1]), np.float32)
    some = mel[start : min(end, start + size)]
    made[: len(some)] = some
    return made
