"""GGUF files are written as they are read: header, every format's numbers, whole or not at all."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_writing import decoded, normal
from quire.core.errors import ConfigError, ModelError
from quire.gguf.encode import ENCODERS, SIZES, encode
from quire.gguf.file import GgufFile
from quire.gguf.k_encode import _descend, _fit, _fit_with_minimum, _Steps
from quire.gguf.writer import NewTensor, write_file

QUICK = settings(max_examples=20, deadline=None)


ERRORS = {
    "F32": 0.0, "F16": 0.0003, "BF16": 0.0024, "Q8_0": 0.0063, "Q5_1": 0.047, "Q5_0": 0.049, "Q4_1": 0.095,
    "Q4_0": 0.1, "Q6_K": 0.021, "Q5_K": 0.040, "Q4_K": 0.080, "Q3_K": 0.18, "Q2_K": 0.32,
}  # fmt: skip
"""Format -> bound on the relative error (root of mean squares) on normal numbers."""


@pytest.mark.parametrize("kind", ENCODERS)
def test_errors_on_normal_numbers(kind: str) -> None:
    x = normal()
    got = decoded(encode(x, kind), kind)
    assert np.sqrt(((got - x) ** 2).mean()) <= ERRORS[kind] * np.sqrt((x * x).mean())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_bytes_are_those_of_the_gguf_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is in the dev extra")
    x = normal(16, 256, seed=1)
    x[0, :32], x[1, :32], x[2, :32], x[3, :32] = 0, 1.5, -2.0, np.linspace(-1, 1, 32)
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(encode(x, kind), want.view(np.uint8).reshape(16, -1))


@QUICK
@given(
    kind=st.sampled_from(sorted(ENCODERS)),
    n=st.integers(1, 4),
    blocks=st.integers(1, 3),
    scale=st.sampled_from([0.02, 1.0, 50.0]),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    seed=st.integers(0, 1 << 30),
)
def test_rows_of_all_sizes(kind: str, n: int, blocks: int, scale: float, shift: float, seed: int) -> None:
    """What is read is within a step of each number, and a row's bytes do not depend on the others."""
    x = ((normal(n, blocks * 256, seed) + shift) * scale).astype(np.float32)
    raw = encode(x, kind)
    assert raw.shape == (n, blocks * 256 // SIZES[kind].numbers * SIZES[kind].nbytes) and raw.dtype == np.uint8
    got = decoded(raw, kind)
    relative = np.sqrt(((got - x) ** 2).mean() / (x * x).mean())
    assert relative <= 1.3 * ERRORS[kind] + 1e-4
    assert np.array_equal(encode(x[-1:], kind)[0], raw[-1])


@pytest.mark.parametrize("kind", ENCODERS)
def test_zeros_and_equal_numbers(kind: str) -> None:
    x = np.zeros((2, 512), np.float32)
    assert np.array_equal(decoded(encode(x, kind), kind), x)
    x[:] = 0.25
    assert np.abs(decoded(encode(x, kind), kind) - x).max() <= 0.25 * 0.07


def scalar_fit(x: Any, weights: Any, most: int, first: float, count: int, absolute: bool) -> float:
    """The least error of make_qkx2_quants on one group, number by number in float64."""
    low, high = min(float(x.min()), 0.0), float(x.max())

    def outcome(scale: float, least: float, codes: list[int]) -> float:
        miss = [scale * c + least - float(v) for c, v in zip(codes, x, strict=True)]
        return sum(float(w) * (abs(m) if absolute else m * m) for w, m in zip(weights, miss, strict=True))

    def codes_at(inverse: float) -> list[int]:
        return [min(most, max(0, round(inverse * (float(v) - low)))) for v in x]

    best = outcome((high - low) / most, low, codes_at(most / (high - low)))
    for i in range(count + 1):
        codes = codes_at((first + 0.1 * i + most) / (high - low))
        w, v = weights.astype(float), x.astype(float)
        c = np.array(codes, float)
        d = w.sum() * (w * c * c).sum() - (w * c).sum() ** 2
        if d <= 0:
            continue
        scale = (w.sum() * (w * c * v).sum() - (w * v).sum() * (w * c).sum()) / d
        least = ((w * c * c).sum() * (w * v).sum() - (w * c).sum() * (w * c * v).sum()) / d
        if least > 0:
            scale, least = (w * c * v).sum() / (w * c * c).sum(), 0.0
        if (own := outcome(scale, least, codes)) < best:
            best, low = own, least
    return best


@pytest.mark.parametrize(("most", "first", "count", "absolute"), [(15, -1.0, 20, False), (3, -0.5, 15, True)])
def test_the_search_with_a_minimum_is_the_definition(most: int, first: float, count: int, absolute: bool) -> None:
    x = normal(12, 32, seed=2)
    weights = np.abs(x) + 0.5
    scale, least = _fit_with_minimum(x[None], weights[None], _Steps(most, first, count), absolute)
    for row in range(len(x)):
        want = scalar_fit(x[row], weights[row], most, first, count, absolute)
        codes = np.clip(np.rint((x[row] + least[0, row]) / scale[0, row]), 0, most)
        miss = scale[0, row] * codes - least[0, row] - x[row]
        got = float((weights[row] * (np.abs(miss) if absolute else miss * miss)).sum())
        assert got <= want * 1.0001  # codes anew are the nearest, so the error can only be less


def test_the_symmetric_search_is_the_definition() -> None:
    x = normal(12, 16, seed=3)
    scale = _fit(x[None], 32)[0]
    for row in range(len(x)):
        v = x[row].astype(float)
        top, w, best, want = v[np.abs(v).argmax()], v * v, 0.0, 0.0
        for i in (0, *range(-9, 0), *range(1, 10)):
            codes = np.clip(np.rint(-(32 + 0.1 * i) / top * v), -32, 31)
            dot, norm = (w * v * codes).sum(), (w * codes * codes).sum()
            if norm > 0 and dot * dot > best * norm:
                want, best = dot / norm, dot / norm * dot
        assert np.isclose(scale[row], want, rtol=1e-5)


def test_descent_lessens_the_error() -> None:
    x = normal(64, 16, seed=4)
    weights = x * x

    def error(scale: Any) -> Any:
        codes = np.clip(np.rint(x / scale[:, None]), -4, 3)
        return (weights * (x - codes * scale[:, None]) ** 2).sum(1)

    plain = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0] / -4
    assert (error(_descend(x[None], 4)[0]) <= error(plain) * 1.0001).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none(bad: float) -> None:
    x = normal(4, 256)
    x[3, 7] = bad
    for kind in ENCODERS:
        with pytest.raises(ModelError, match="nan or inf"):
            encode(x, kind)
    x[3, 7] = 3e8
    for kind in ("F16", "Q8_0", "Q4_K"):
        with pytest.raises(ModelError, match="65504"):
            encode(x, kind)


METADATA: dict[str, Any] = {
    "general.architecture": "llama", "a.flag": True, "a.count": 7, "a.large": 1 << 40, "a.less": -3, "a.number": 0.5,
    "a.words": ["x", "", "\u00e4\n"], "a.scores": np.array([0.5, -1.5], np.float32),
    "a.types": np.array([1, 6], np.int32),
}  # fmt: skip


TEXTS = ["short", "\u00e9" * 100, "", "x" * 130, "\u00e9\u00df", "y" * 127, "\u00e9" * 64]


@pytest.mark.parametrize("bad", range(len(TEXTS)))
def test_each_text_of_a_list_is_looked_at(bad: int, tmp_path: Path) -> None:
    """Short ones together, long ones alone: one that is cut within a character is found wherever it stands."""
    path, texts = tmp_path / "model.gguf", [*TEXTS]
    write_file(path, {"a.list": texts, "b": 1}, [], [])
    file = GgufFile(path)
    assert file.metadata.count("a.list") == len(texts) and file.metadata.count("b") is None
    assert file.metadata.texts("a.list", [3, bad]) == [texts[3], texts[bad]]
    assert file.metadata["a.list"] == texts and file.metadata["b"] == 1
    raw = path.read_bytes()
    behind = raw.index(TEXTS[0].encode()) + sum(8 + len(text.encode()) for text in TEXTS[:bad])
    last = behind + len(TEXTS[bad].encode()) - 1
    path.write_bytes(raw[:last] + b"\xc3" + raw[last + 1 :])
    if TEXTS[bad]:
        with pytest.raises(ModelError, match=f"a.list: entry {bad} is not UTF-8 text"):
            GgufFile(path)


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_file_is_read_as_it_was_written(alignment: int | None, tmp_path: Path) -> None:
    metadata = METADATA | ({"general.alignment": alignment} if alignment else {})
    x = normal(3, 512)
    tensors = [NewTensor("v", "F32", (5,)), NewTensor("m", "Q4_K", (3, 512)), NewTensor("e", "F16", (3, 2, 256))]
    data = [np.arange(5, dtype=np.float32), encode(x, "Q4_K"), x.astype(np.float16)]
    path = tmp_path / "model.gguf"
    path.write_text("another")
    write_file(path, metadata, tensors, iter(data))
    file = GgufFile(path)
    assert [*file.metadata] == [*metadata] and [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    for key, value in metadata.items():
        assert np.array_equal(file.metadata[key], value) and type(file.metadata[key]) is type(value), key
    for tensor, array in zip(tensors, data, strict=True):
        found = file.tensors[tensor.name]
        assert (found.shape, found.type.name) == (tensor.shape, tensor.type)
        assert file.data[found.start : found.start + found.nbytes] == array.tobytes()
        assert found.start % (alignment or 32) == 0


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is in the dev extra")
    x, path = normal(4, 512), tmp_path / "model.gguf"
    write_file(path, METADATA, [NewTensor("m", "Q6_K", (4, 512))], [encode(x, "Q6_K")])
    reader = gguf.GGUFReader(path)
    assert reader.fields["a.words"].contents() == METADATA["a.words"] and reader.fields["a.less"].contents() == -3
    (tensor,) = reader.tensors
    assert tensor.tensor_type.name == "Q6_K" and tensor.shape.tolist() == [512, 4]
    want = decoded(encode(x, "Q6_K"), "Q6_K")
    assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), want)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("as it was")
    with pytest.raises(ConfigError, match="has 4 bytes"):
        write_file(path, {}, [NewTensor("v", "F32", (5,))], [np.zeros(1, np.float32)])
    with pytest.raises(ConfigError, match="rows of 32 numbers, Q4_K has blocks of 256"):
        write_file(path, {}, [NewTensor("v", "Q4_K", (5, 32))], [])
    with pytest.raises(ConfigError, match="a: set has no form"):
        write_file(path, {"a": {1}}, [], [])
    with pytest.raises(ConfigError, match=r"none/model\.gguf cannot be written: No such file"):
        write_file(tmp_path / "none" / "model.gguf", {}, [], [])
    assert path.read_text() == "as it was" and [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses more than so many bytes, as it does when a disk is full."""
    path, limits = tmp_path / "model.gguf", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"model\.gguf cannot be written: File too large"):
            write_file(path, {}, [NewTensor("v", "F32", (1 << 20,))], [np.zeros(1 << 20, np.float32)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not [*tmp_path.iterdir()]
