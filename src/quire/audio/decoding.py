"""Files of sound, which anybody may send, as one channel of 16 kHz: within limits of bytes and of seconds.

libsndfile reads them, a piece at a time (wav, flac, ogg, mp3 and others). What it makes of a file that is broken in its
own way is a `BadRequest` here.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.audio.resampling import Resampler, Samples
from quire.core.errors import BadRequest

RATE = 16_000
"""Samples of a second that models read."""
FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64"})
"""libsndfile's names of what is read."""
RATES = 1_000, 768_000
CHANNELS = 64
PIECE = 1 << 16
"""Numbers that are decoded at a time."""
_TOLD = 200
"""Characters of a decoder's words that are told."""


@dataclass(frozen=True)
class AudioLimits:
    """What a file may have at most: `bytes`, and `seconds` of sound, each of which takes 64 kB once decoded."""

    bytes: int = 64 << 20
    seconds: float = 4 * 3600.0


def soundfile() -> Any:
    """The module soundfile; `BadRequest` says how to come by it."""
    try:
        import soundfile
    except (ImportError, OSError):
        raise BadRequest("audio is read by soundfile, which is not installed: pip install 'quire[audio]'") from None
    return soundfile


def read_audio(data: bytes, limits: AudioLimits = AudioLimits()) -> Samples:
    """The sound of a file as one channel at `RATE`, f32 [n]; several channels are averaged.

    `BadRequest` with the reason for what is empty, too large, too long, of a format that is not read, or broken.
    """
    reader = soundfile()
    if not data:
        raise BadRequest("the audio is empty: it has 0 bytes")
    if len(data) > limits.bytes:
        raise BadRequest(f"the audio has {len(data)} bytes, and at most {limits.bytes} are read")
    try:
        with reader.SoundFile(io.BytesIO(data)) as file:
            return _decoded(file, limits)
    except (reader.SoundFileError, ValueError, OverflowError, MemoryError) as error:
        told = getattr(error, "error_string", "") or str(error)  # the whole message names an object of this process
        raise BadRequest(f"the audio cannot be read: {told[:_TOLD] or type(error).__name__}") from None


def read_audio_file(path: str | Path, limits: AudioLimits = AudioLimits()) -> Samples:
    """The sound of the file `path`; `BadRequest` as of `read_audio`, and where there is no such file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(limits.bytes + 1)
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    try:
        return read_audio(data, limits)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message}") from None


def _decoded(file: Any, limits: AudioLimits) -> Samples:
    """Decode all of an open file; lengths that its header names are not believed."""
    rate, channels = int(file.samplerate), int(file.channels)
    if file.format not in FORMATS:
        raise BadRequest(f"audio of the format {file.format} is not read; wav, flac, ogg and mp3 are")
    if not RATES[0] <= rate <= RATES[1] or not 0 < channels <= CHANNELS:
        raise BadRequest(f"audio of {rate} Hz and {channels} channels is not read")
    sound, most, frames = _Sound(rate), limits.seconds * rate, 0
    while len(piece := file.read(max(1, PIECE // channels), dtype="float32", always_2d=True)):
        frames += len(piece)
        if frames > most:
            raise BadRequest(f"the audio is longer than the {limits.seconds:g} s that are read")
        sound.push(one_channel(piece))
    if not frames:
        raise BadRequest("the audio is empty: it has 0 samples")
    return sound.finish()


class _Sound:
    """Samples at `RATE` of pieces at `rate`, in one array that grows where it lies: pieces that are joined at the end
    would be in memory twice."""

    def __init__(self, rate: int) -> None:
        self._resampler, self._made, self._count = Resampler(rate, RATE), np.zeros(PIECE, np.float32), 0

    def push(self, piece: Samples) -> None:
        """Take the next samples [n]."""
        self._add(self._resampler.push(piece))

    def finish(self) -> Samples:
        """All samples [n]; nothing is pushed afterwards."""
        self._add(self._resampler.finish())
        self._made.resize(self._count, refcheck=False)
        return self._made

    def _add(self, part: Samples) -> None:
        end = self._count + len(part)
        if end > len(self._made):
            self._made.resize(max(end, len(self._made) * 9 // 8), refcheck=False)
        self._made[self._count : end] = part
        self._count = end


def one_channel(sound: NDArray[np.float32]) -> Samples:
    """sound [n, channels] as the mean of its channels [n]; `BadRequest` where it has numbers that are none."""
    mean = sound[:, 0] if sound.shape[1] == 1 else sound.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mean).all():
        raise BadRequest("the audio holds samples that are no numbers (NaN or infinity)")
    return np.ascontiguousarray(mean)


def samples_of(sound: Any, rate: int = RATE, limits: AudioLimits = AudioLimits()) -> Samples:
    """An array of samples, [n] or [n, channels] at `rate`, as one channel at `RATE`.

    Whole numbers are taken for parts of the largest that their type has; `BadRequest` for those of 64 bits, as Python's
    are, of which nobody knows that.
    """
    array = np.asarray(sound)
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "fi":
        raise BadRequest(f"audio: {array.dtype} {list(array.shape)} is no row of samples [n] or [n, channels]")
    if array.dtype.kind == "i" and array.dtype.itemsize > 4:
        raise BadRequest(
            f"audio: {array.dtype} does not say how loud a sample can be; give an array of int16 or int32, or of "
            "floats in [-1, 1]"
        )
    channels = array.shape[1] if array.ndim == 2 else 1
    if not RATES[0] <= rate <= RATES[1] or channels > CHANNELS:
        raise BadRequest(f"audio of {rate} Hz and {channels} channels is not read; channels are the second axis")
    if len(array) > limits.seconds * rate:
        raise BadRequest(f"the audio is longer than the {limits.seconds:g} s that are read")
    scale = 1.0 / -float(np.iinfo(array.dtype).min) if array.dtype.kind == "i" else 1.0
    made = _Sound(rate)
    for start in range(0, len(array), PIECE):
        piece = (array[start : start + PIECE] * scale).astype(np.float32)
        made.push(one_channel(piece.reshape(len(piece), -1)))
    return made.finish()
