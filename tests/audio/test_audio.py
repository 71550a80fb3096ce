"""Files of sound become samples of 16 kHz, broken ones are refused, and spectrograms are transformers'."""

from __future__ import annotations

import io
import tracemalloc
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.audio.decoding import RATE, AudioLimits, read_audio, read_audio_file, samples_of
from quire.audio.log_mel import FRAMES, log_mel, window_at
from quire.audio.resampling import Resampler, resample
from quire.core.errors import BadRequest

FORMATS = ("wav", "flac", "ogg", "mp3")


def tone(hertz: float, seconds: float, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav_of(samples: np.ndarray[Any, Any], rate: int, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def encoded(samples: np.ndarray[Any, Any], rate: int, form: str) -> bytes:
    soundfile, file = pytest.importorskip("soundfile"), io.BytesIO()
    soundfile.write(file, samples, rate, format=form.upper())
    return file.getvalue()


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 44101])
def test_tones_keep_their_frequency_and_loudness(rate: int) -> None:
    """In the middle, where no edge is near, a tone below both halves of the rates is the same tone."""
    for hertz in (100.0, 440.0, 3000.0):
        made = resample(tone(hertz, 0.5, rate), rate, RATE)
        wanted = tone(hertz, 0.5, RATE)
        assert abs(len(made) - len(wanted)) <= 1
        middle = slice(1000, len(wanted) - 1000)
        assert np.abs(made[middle] - wanted[middle]).max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_left_out() -> None:
    made = resample(tone(11000, 0.5, 48000), 48000, RATE)
    assert np.abs(made[1000:-1000]).max() < 1e-3


@pytest.mark.parametrize("rate", [44100, 48000, 8000])
def test_resampling_is_close_to_scipys(rate: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    rng = np.random.default_rng(1)
    low = resample(rng.standard_normal(6000).astype(np.float32), 6000, rate)  # nothing above 3 kHz
    common = np.gcd(RATE, rate)
    wanted = signal.resample_poly(low, RATE // common, rate // common)
    made = resample(low, rate, RATE)
    middle = slice(500, len(wanted) - 500)
    error = np.sqrt(np.mean((made[middle] - wanted[middle]) ** 2) / np.mean(wanted[middle] ** 2))
    assert error < 0.01


def test_pieces_change_no_sample() -> None:
    sound = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    whole = resample(sound, 44100, RATE)
    made, parts, at = Resampler(44100, RATE), [], 0
    for size in (1, 7, 5000, 333, 12_000, 20_000):
        parts.append(made.push(sound[at : at + size]))
        at += size
    np.testing.assert_array_equal(np.concatenate((*parts, made.finish())), whole)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rate", [16000, 44100])
def test_files_are_read(form: str, rate: int) -> None:
    sound = tone(440, 1.5, rate)
    made = read_audio(encoded(np.stack((sound, sound), 1), rate, form))
    assert made.dtype == np.float32 and abs(len(made) / RATE - 1.5) < 0.08
    spectrum = np.abs(np.fft.rfft(made))
    assert abs(spectrum.argmax() * RATE / len(made) - 440) < 2
    assert abs(np.sqrt(np.mean(made[2000:-2000] ** 2)) - 0.5 / np.sqrt(2)) < 0.02


def test_broken_files_are_refused() -> None:
    pytest.importorskip("soundfile")
    rng, good = np.random.default_rng(3), [encoded(tone(300, 0.3, 16000), 16000, form) for form in FORMATS]
    for data in (b"", b"RIFF", b"hello" * 100, good[0][:20], b"ID3" + bytes(50)):
        with pytest.raises(BadRequest) as caught:
            read_audio(data)
        assert "BytesIO" not in caught.value.message
    read = refused = 0
    for number in range(200):
        data = bytearray(good[number % 4])
        if number % 3 == 0:
            data = data[: rng.integers(1, len(data))]
        for at in rng.integers(0, min(len(data), 200 if number % 2 else len(data)), 8):
            data[at] = rng.integers(256)
        try:
            made = read_audio(bytes(data), AudioLimits(seconds=60))
            assert np.isfinite(made).all() and len(made) <= 61 * RATE
            read += 1
        except BadRequest:
            refused += 1
    assert refused and read + refused == 200


def test_limits() -> None:
    pytest.importorskip("soundfile")
    data = wav_of(np.zeros(32000), 16000)
    with pytest.raises(BadRequest, match="at most 1000"):
        read_audio(data, AudioLimits(bytes=1000))
    with pytest.raises(BadRequest, match="longer than the 1 s"):
        read_audio(data, AudioLimits(seconds=1))
    with pytest.raises(BadRequest, match="0 samples"):
        read_audio(wav_of(np.zeros(0), 16000))


def test_a_small_file_of_much_silence_takes_no_more_than_its_limit() -> None:
    data = encoded(np.zeros(16000 * 600, np.int16), 16000, "flac")
    assert len(data) < 1 << 18
    tracemalloc.start()
    with pytest.raises(BadRequest, match="longer than"):
        read_audio(data, AudioLimits(seconds=20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * RATE * 4 * 3


def test_files_by_path(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "a.wav").write_bytes(wav_of(tone(200, 0.2, 16000), 16000))
    assert len(read_audio_file(tmp_path / "a.wav")) == 3200
    with pytest.raises(BadRequest, match="No such file"):
        read_audio_file(tmp_path / "b.wav")


def test_arrays_of_samples() -> None:
    made = samples_of(np.array([[16384, 0]] * 100, np.int16))
    np.testing.assert_allclose(made, np.full(100, 0.25), atol=1e-6)
    for wrong in (np.zeros((2, 2, 2)), np.zeros(0), np.array(["a"]), np.array([np.nan])):
        with pytest.raises(BadRequest):
            samples_of(wrong)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.3, 7.0, 30.0, 41.0])
def test_spectrograms_are_those_of_transformers(bins: int, seconds: float) -> None:
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(5)
    sound = (tone(440, seconds, RATE) + 0.05 * rng.standard_normal(round(seconds * RATE))).astype(np.float32)
    extract = transformers.WhisperFeatureExtractor(feature_size=bins)
    padded = np.pad(sound, (0, max(0, 30 * RATE - len(sound))))
    made, wanted = log_mel(sound, bins), extract._np_extract_fbank_features(padded[None], "cpu")[0].T
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    padding = "max_length" if seconds <= 30 else "longest"
    called = extract(sound, sampling_rate=RATE, truncation=False, padding=padding, return_tensors="np")
    by_torch = called["input_features"][0].T  # in f32, whose spectra of soft frames are themselves less exact
    assert np.abs(made - by_torch).mean() < 1e-6
    assert np.abs(made - by_torch).max() < np.abs(wanted - by_torch).max() + 1e-6
    assert len(made) == max(FRAMES, round(seconds * RATE) // 160)


def test_windows_are_followed_by_zeros() -> None:
    mel = log_mel(tone(100, 31, RATE), 80)
    made = window_at(mel, 3000, len(mel))
    assert made.shape == (FRAMES, 80) and not made[100:].any()
    np.testing.assert_array_equal(made[:100], mel[3000:])


def test_arrays_with_channels_first_are_refused() -> None:
    """Their mean over seconds would be a sound of as many samples as there are channels."""
    with pytest.raises(BadRequest, match="second axis"):
        samples_of(np.zeros((2, 16_000), np.float32))
    assert len(samples_of(np.zeros((16_000, 2), np.float32))) == 16_000


@pytest.mark.parametrize("sound", [[0, 12_000, -12_000] * 20, np.zeros(60, np.int64)], ids=["list", "int64"])
def test_whole_numbers_without_a_scale_are_refused(sound: list[int]) -> None:
    """Parts of the largest 64-bit number would be silence."""
    with pytest.raises(BadRequest, match=r"int64 does not say how loud .* int16"):
        samples_of(sound)
    assert abs(samples_of(np.array([0, 12_000, -12_000] * 20, np.int16))).max() > 0.3


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "talk.wav").write_bytes(b"RIFF1234")
    with pytest.raises(BadRequest, match=r"talk\.wav: the audio cannot be read"):
        read_audio_file(tmp_path / "talk.wav")
