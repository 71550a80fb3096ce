"""Damaged model files: refused with a message or read, never a crash, a hang, memory beyond the file's size, or a file
accepted that the format's own library refuses."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from mutate import bounded, changed_header, damaged, damaged_json
from oracle import SMALL, backend, write
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.build import load_model
from quire.model.describe import describe
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 60}
REFUSED = (ModelError, ConfigError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    write(path, "llama", **TINY)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="the gguf package writes and checks the files; it is in the dev extra")
    from gguf.constants import GGMLQuantizationType as Type

    from gguf_models import write_gguf

    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    write_gguf(path, quantize=lambda name: Type.Q8_0 if "ffn" in name else None, **TINY)
    return path


def tries(first: int, count: int) -> range:
    """Seeds, which a failure shows."""
    return range(first, first + count)


def accepts(attempt: Callable[[], object], what: str, size: int) -> bool:
    """Whether `attempt` succeeds; it may only fail by refusing, in bounded time and memory."""
    with bounded(size, what):
        try:
            attempt()
        except REFUSED as error:
            assert error.exit_code == 2 and error.message, what
            return False
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return True


def run_safetensors(folder: Path, work: Path, seeds: range) -> int:
    """Damaged model.safetensors beside a sound config.json; returns how many were accepted."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    (work / "config.json").write_bytes((folder / "config.json").read_bytes())
    path, accepted = work / "model.safetensors", 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        if seed % 3:
            damage = changed_header if seed % 3 == 1 else damaged_json
            text = damage(header, rng).encode("utf-8", "replace")
            mutant = struct.pack("<Q", len(text)) + text + raw[8 + length :]
        else:
            mutant = damaged(raw, 8 + length, rng)
        path.write_bytes(mutant)
        if accepts(lambda: describe(str(work)), f"safetensors seed {seed}", len(mutant)):
            accepted += 1
            with safe_open(path, framework="np") as theirs:
                assert all(theirs.get_tensor(name) is not None for name in theirs.keys()), seed  # noqa: SIM118
    return accepted


def run_gguf(source: Path, work: Path, seeds: range) -> int:
    """Damaged GGUF files through description, tokenizer, template and now and then the whole load."""
    import gguf

    from mutate_gguf import changed
    from quire.gguf.file import GgufFile

    raw, path, accepted = source.read_bytes(), work / "model.gguf", 0
    header = min(t.start for t in GgufFile(source).tensors.values())
    options = flat_config(model=str(path))

    def read() -> None:
        describe(str(path))
        tokenizer = Tokenizer.from_folder(path)
        tokenizer.encode("a text <s> of words")
        ChatTemplate.from_folder(path, tokenizer)

    for seed in seeds:
        rng = np.random.default_rng(seed)
        mutant = damaged(raw, header, rng) if seed % 2 else changed(raw, rng)
        path.unlink(missing_ok=True)  # the last one may still be mapped
        path.write_bytes(mutant)
        if accepts(read, f"gguf seed {seed}", len(mutant)):
            accepted += 1
            assert len(gguf.GGUFReader(path).tensors) > 0, seed
            if accepted % 16 == 0:
                accepts(lambda: load_model(options, backend("reference")), f"gguf load, seed {seed}", len(mutant))
    return accepted


def run_config(folder: Path, work: Path, seeds: range) -> int:
    """Damaged config.json, with the sound weights and with made-up ones of the shapes it asks for."""
    sound = json.loads((folder / "config.json").read_text())
    path, accepted = work / "config.json", 0
    (work / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    kinds = ("llama", "gemma3_text", "gpt2", "falcon", "mpt", "phi3", "opt", "qwen2", "granite", "bloom")
    for seed in seeds:
        base = sound if seed % 2 else SMALL | {"model_type": kinds[seed // 2 % len(kinds)], "sliding_window": 5}
        text = damaged_json(base, np.random.default_rng(seed))
        path.write_text(text, encoding="utf-8", errors="replace")
        form = "auto" if seed % 2 else "dummy"
        accepted += accepts(lambda form=form: describe(str(work), form), f"config seed {seed}", len(text))
    return accepted


def test_damaged_safetensors(folder: Path, tmp_path: Path) -> None:
    assert run_safetensors(folder, tmp_path, tries(0, 2000)) < 1900


def test_damaged_gguf(gguf_file: Path, tmp_path: Path) -> None:
    assert run_gguf(gguf_file, tmp_path, tries(0, 2000)) < 1900


def test_damaged_config(folder: Path, tmp_path: Path) -> None:
    assert 10 < run_config(folder, tmp_path, tries(0, 1000)) < 950


PARTS = 20
EACH = 10_000
"""Mutants of a part: 200,000 of each kind of file in all, minutes a part (`-m nightly -k "gguf and part7"`)."""
parts = pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part}")


def seeds_of(part: int) -> range:
    """The seeds of a part; those of the tests above are below."""
    return tries(EACH * (part + 1), EACH)


@pytest.mark.nightly
@parts
def test_many_safetensors(part: int, folder: Path, tmp_path: Path) -> None:
    print(f"{run_safetensors(folder, tmp_path, seeds_of(part))} of {EACH} accepted")


@pytest.mark.nightly
@parts
def test_many_gguf(part: int, gguf_file: Path, tmp_path: Path) -> None:
    print(f"{run_gguf(gguf_file, tmp_path, seeds_of(part))} of {EACH} accepted")


@pytest.mark.nightly
@parts
def test_many_configs(part: int, folder: Path, tmp_path: Path) -> None:
    print(f"{run_config(folder, tmp_path, seeds_of(part))} of {EACH} accepted")
