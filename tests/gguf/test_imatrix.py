"""Importance of columns from llama-imatrix: both forms of its files, and what they do to numbers that are rounded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf_writing import SHAPE, add_tokenizer, byte_level, decoded, normal
from oracle import write
from quire.compress.layouts.gguf import write_gguf
from quire.core.errors import ConfigError, ModelError
from quire.gguf.encode import ENCODERS, WEIGHTED, encode
from quire.gguf.file import GgufFile
from quire.gguf.imatrix import importance_of, read_imatrix
from quire.gguf.writer import NewTensor, write_file

K = 256


def skewed(seed: int = 5, k: int = K) -> Any:
    """A few columns that count a thousand times as much as others."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(k) < 0.05, 100.0, 0.1).astype(np.float32) * rng.uniform(0.5, 1.5, k).astype(np.float32)


def write_new(path: Path, sums: dict[str, tuple[Any, Any]]) -> None:
    """As llama-imatrix writes it: sums of squares, and counts, of each matrix of a tensor."""
    tensors, data = [], []
    for name, (total, counts) in sums.items():
        for end, array in ((".in_sum2", total), (".counts", counts[:, None])):
            tensors.append(NewTensor(name + end, "F32", array.shape))
            data.append(array.astype("<f4"))
    facts = {"general.type": "imatrix", "imatrix.datasets": ["wiki.txt"], "imatrix.chunk_count": 3,
             "imatrix.chunk_size": 512}  # fmt: skip
    write_file(path, facts, tensors, data)


def write_old(path: Path, sums: dict[str, Any], calls: int) -> None:
    """As it wrote it before: names, calls, sums over them; then how many chunks there were, and of what text."""
    out = struct.pack("<i", len(sums))
    for name, values in sums.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
        out += values.astype("<f4").tobytes()
    path.write_bytes(out + struct.pack("<ii", 3, 8) + b"wiki.txt")


def test_both_forms_are_read(tmp_path: Path) -> None:
    one, experts = skewed(), np.stack([skewed(1), skewed(2), skewed(3)])
    counts = np.array([4.0, 0.0, 8.0], np.float32)
    write_new(tmp_path / "new.gguf", {"blk.0.attn_q.weight": (one[None] * 6, np.array([6.0])),
                                      "blk.0.ffn_up_exps.weight": (experts * counts[:, None], counts)})  # fmt: skip
    found = read_imatrix(tmp_path / "new.gguf")
    assert np.allclose(found["blk.0.attn_q.weight"], one[None], rtol=1e-6)
    routed = found["blk.0.ffn_up_exps.weight"]
    assert np.allclose(routed[::2], experts[::2], rtol=1e-6) and (routed[1] == 1).all(), "no token chose the second"
    assert np.array_equal(importance_of(found, "blk.0.ffn_up_exps.weight", 2, 3, K, "f"), routed[2])
    assert importance_of(found, "blk.7.attn_q.weight", 0, 1, K, "f") is None
    with pytest.raises(ModelError, match=r"f: blk\.0\.attn_q\.weight: has 256 numbers, not 1 x 128"):
        importance_of(found, "blk.0.attn_q.weight", 0, 1, 128, "f")
    write_old(tmp_path / "old.dat", {"blk.0.attn_q.weight": one * 5, "blk.0.ffn_up_exps.weight": experts * 5}, 5)
    found = read_imatrix(tmp_path / "old.dat")
    assert np.allclose(found["blk.0.attn_q.weight"], one[None], rtol=1e-6)
    assert np.allclose(importance_of(found, "blk.0.ffn_up_exps.weight", 1, 3, K, "f"), experts[1], rtol=1e-6)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    with pytest.raises(ModelError, match="no such file"):
        read_imatrix(path)
    for data in (b"", b"no such thing", struct.pack("<ii", 2, 1 << 30), struct.pack("<i", 0)):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"imatrix\.dat"):
            read_imatrix(path)
    write_old(path, {"blk.0.attn_q.weight": -skewed()}, 1)
    with pytest.raises(ModelError, match="below 0"):
        read_imatrix(path)
    write_file(path, {"general.type": "imatrix"}, [NewTensor("x", "F32", (1, 4))], [np.ones((1, 4), np.float32)])
    with pytest.raises(ModelError, match="no file of llama-imatrix"):
        read_imatrix(path)


@pytest.mark.parametrize("kind", ENCODERS)
def test_columns_that_count_more_are_nearer(kind: str) -> None:
    x, importance = normal(32, K), skewed()
    plain, weighted = encode(x, kind), encode(x, kind, importance)
    if kind not in WEIGHTED:
        assert np.array_equal(plain, weighted)
        return

    def error(raw: Any) -> float:
        return float((importance * (decoded(raw, kind) - x) ** 2).sum())

    assert error(weighted) < 0.9 * error(plain)
    even = encode(x, kind, np.full(K, 7.0, np.float32))
    assert np.square(decoded(even, kind) - x).sum() < 1.25 * np.square(decoded(plain, kind) - x).sum()


def test_files_are_written_by_it(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    write(folder, "llama", **SHAPE | {"hidden_size": K, "intermediate_size": K})
    add_tokenizer(folder, byte_level())
    write_gguf(folder, path, "Q4_K")
    before = {
        name: bytes(GgufFile(path).data[t.start : t.start + t.nbytes]) for name, t in GgufFile(path).tensors.items()
    }
    write_new(tmp_path / "imatrix.gguf", {"blk.0.ffn_up.weight": (skewed()[None], np.ones(1))})
    write_gguf(folder, path, "Q4_K", imatrix=tmp_path / "imatrix.gguf")
    file = GgufFile(path)
    changed = [n for n, t in file.tensors.items() if bytes(file.data[t.start : t.start + t.nbytes]) != before[n]]
    assert changed == ["blk.0.ffn_up.weight"]
    write_new(tmp_path / "other.gguf", {"blk.0.ffn_xyz.weight": (skewed()[None], np.ones(1))})
    with pytest.raises(ConfigError, match="of another model"):
        write_gguf(folder, path, "Q4_K", imatrix=tmp_path / "other.gguf")
