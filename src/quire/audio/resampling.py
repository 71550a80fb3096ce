"""Sound brought to another sampling rate by a windowed sinc, piece by piece (Smith 1984)."""

from __future__ import annotations

from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
ZEROS = 24
"""Zero crossings of the sinc on each side of its middle."""
BETA = 8.6
"""Of the Kaiser window: what passes beside the band is 86 dB below it."""
ROLLOFF = 0.945
"""The band that is kept, in parts of the lower of both rates' halves."""
MOST_WEIGHTS = 1 << 24
"""Weights that are kept at a time; rates whose table would have more are rounded to a ratio with fewer phases."""
AT_ONCE = 1 << 14
"""Samples that are made at a time: their inputs are gathered, a hundred times as many numbers."""


class Resampler:
    """Samples at `given` Hz to samples at `wanted` Hz. Where the pieces end that are pushed changes no sample.

    Sample m is the sum over inputs near m * down / up of a filter that has `up` phases, which repeat.
    """

    def __init__(self, given: int, wanted: int) -> None:
        common = gcd(given, wanted)
        self._up, self._down = wanted // common, given // common
        band = min(1.0, wanted / given) * ROLLOFF
        self._half = ceil(ZEROS / band)
        most = max(1, MOST_WEIGHTS // (2 * self._half))
        if self._up > most:
            self._down, self._up = round(self._down * most / self._up), most
        at = np.arange(1 - self._half, self._half + 1) - np.arange(self._up)[:, None] / self._up
        window = np.i0(BETA * np.sqrt(np.maximum(0, 1 - (at / self._half) ** 2))) / np.i0(BETA)
        self._filter = (band * np.sinc(band * at) * window).astype(np.float32)
        self._same = given == wanted
        self._held = np.zeros(self._half - 1, np.float32)
        self._first, self._made, self._given = 1 - self._half, 0, 0

    def push(self, samples: Samples) -> Samples:
        """The samples that can be made now that `samples` have come."""
        self._given += len(samples)
        if self._same:
            return samples
        self._held = np.concatenate((self._held, samples))
        return self._make((self._first + len(self._held) - self._half - 1) * self._up // self._down + 1)

    def finish(self) -> Samples:
        """The samples that are left: behind the last one that came is silence."""
        if self._same:
            return np.zeros(0, np.float32)
        self._held = np.concatenate((self._held, np.zeros(self._half + 1, np.float32)))
        return self._make(-(-self._given * self._up // self._down))

    def _make(self, end: int) -> Samples:
        """Samples up to before `end`, and forget what no later one reads."""
        parts = []
        reach = np.arange(1 - self._half, self._half + 1)
        while self._made < end:
            wanted = np.arange(self._made, min(end, self._made + AT_ONCE), dtype=np.int64)
            base, phase = np.divmod(wanted * self._down, self._up)
            near = self._held[base[:, None] + reach - self._first]
            parts.append(np.einsum("nk,nk->n", near, self._filter[phase]))
            self._made = int(wanted[-1]) + 1
        keep = self._made * self._down // self._up + 1 - self._half
        if keep > self._first:
            self._held, self._first = self._held[keep - self._first :], keep
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def resample(samples: Samples, given: int, wanted: int) -> Samples:
    """Return `samples` at another rate."""
    made = Resampler(given, wanted)
    return np.concatenate((made.push(samples), made.finish()))
