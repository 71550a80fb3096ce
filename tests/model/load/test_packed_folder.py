"""Packed caches by default: where they lie, how much room they take, and that nobody waits for them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from gguf_models import write_gguf
from loaded_folders import made_anew
from often import one_of
from oracle import write
from quire import LLM
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.machine import cache_folder
from quire.model.build import Model, load_model
from quire.model.load import packed_cache, packed_file, packed_folder, packed_writing
from quire.model.load.packed_folder import NoRoom, make_room
from quire.ops.backend import open_backend
from quire.ops.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")


def load(folder: Path, **options: Any) -> Model:
    config = flat_config(**({"model": str(folder), "quantization": "int4"} | options))
    return load_model(config, open_backend(config.device))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights lie by default; any model is large enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(packed_cache, "SMALLEST", 0)
    return tmp_path / "caches" / "quire" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "llama")
    return tmp_path / "model"


def kept(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


def test_quantized_weights_are_kept_in_the_users_cache_folder(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.iterdir())
    first = load(folder)
    assert first.writing is not None
    first.writing.finish(60)
    made = made_anew(monkeypatch)
    assert load(folder).writing is None and not made
    assert len(kept(home)) == 1 and sorted(folder.iterdir()) == before


def test_the_users_cache_folder_is_below_home_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, base in (
        (str(tmp_path / "x"), tmp_path / "x"),
        ("relative", tmp_path / ".cache"),
        ("", tmp_path / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert cache_folder() == base / "quire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "quire"


@pytest.mark.parametrize(
    "options",
    [{"cache_packed": "off"}, {"quantization": None}, {"load_format": "dummy"}, {"device": "reference"}],
    ids=lambda options: next(iter(options)),
)
def test_what_has_nothing_to_keep_keeps_nothing(folder: Path, home: Path, options: dict[str, Any]) -> None:
    assert load(folder, **options).writing is None
    assert kept(home) == []


def test_what_is_only_laid_out_anew_is_not_kept(tmp_path: Path, home: Path) -> None:
    """A GGUF file's blocks are packed in a pass over its bytes; whoever names a folder gets the file."""
    path = tmp_path / "model.gguf"
    write_gguf(path, quantize=lambda tensor: None if "norm" in tensor else GGMLQuantizationType.Q8_0)
    model = load(path, quantization=None)
    assert model.writing is None and kept(home) == []
    model = load(path, quantization=None, cache_packed=str(home))
    assert model.writing is not None
    model.writing.finish(60)
    assert len(kept(home)) == 1


def test_small_models_are_not_kept_unless_a_folder_is_named(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "SMALLEST", 64 << 20)
    assert load(folder).writing is None
    writing = load(folder, cache_packed=str(home)).writing
    assert writing is not None
    writing.finish(60)
    assert len(kept(home)) == 1


def packed(home: Path, name: str, size: int, used: float) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"packed-{name}.safetensors"
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def test_the_least_recently_used_make_room(home: Path) -> None:
    files = {name: packed(home, name, 100, used) for name, used in (("b", 20.0), ("a", 10.0), ("c", 30.0))}
    (home / "foreign.safetensors").write_bytes(bytes(1000))
    with files["a"].open("rb") as opened:  # as if another process were reading it
        make_room(home / "packed-new.safetensors", 100, 300)
        assert len(opened.read()) == 100
    assert kept(home) == ["foreign.safetensors", "packed-b.safetensors", "packed-c.safetensors"]
    make_room(files["c"], 250, 300)  # what it replaces does not count
    assert kept(home) == ["foreign.safetensors", "packed-c.safetensors"]
    with pytest.raises(NoRoom, match="cache-packed-gib"):
        make_room(home / "packed-new.safetensors", 301, 300)
    assert kept(home) == ["foreign.safetensors", "packed-c.safetensors"], "nothing is removed in vain"


def test_a_start_makes_a_file_the_last_to_go(folder: Path, home: Path) -> None:
    writing = load(folder).writing
    assert writing is not None
    writing.finish(60)
    (path,) = home.iterdir()
    os.utime(path, (10.0, 10.0))
    load(folder)
    other = packed(home, "other", 100, time.time() - 100)
    make_room(home / "packed-new.safetensors", 100, path.stat().st_size + 150)
    assert path.exists() and not other.exists()


def test_a_disk_that_is_nearly_full_is_said_in_a_line(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packed_folder, "FREE_SHARE", 10)
    usage = packed_folder.shutil.disk_usage(folder)
    monkeypatch.setattr(packed_folder.shutil, "disk_usage", lambda _: usage._replace(free=usage.total // 10 + 1000))
    assert load(folder).writing is None
    assert "less than a tenth of the disk free" in caplog.text and kept(home) == []


def test_the_bound_is_an_option(folder: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert load(folder, cache_packed_gib=0.00001).writing is None
    assert "10,737 are allowed" in caplog.text and kept(home) == []
    with pytest.raises(ConfigError, match="--cache-packed-gib"):
        flat_config(cache_packed_gib=-1.0)


def test_nobody_waits_for_the_file(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs delays neither the load nor, by more than asked, the end."""
    begun, hangs, add = Event(), Event(), packed_file.Writer.add

    def slowly(self: packed_file.Writer, *what: Any) -> None:
        begun.set()
        hangs.wait()
        add(self, *what)

    monkeypatch.setattr(packed_file.Writer, "add", slowly)
    monkeypatch.setattr(packed_writing, "CALM_SECONDS", 0.0)
    writing = load(folder).writing
    assert writing is not None
    assert begun.wait(30) and kept(home)[0].startswith(".packed-")
    began = time.monotonic()
    writing.finish(0.1)
    assert time.monotonic() - began < 5 and kept(home) == []
    hangs.set()
    writing.finish(60)
    assert kept(home) == []


def test_closing_a_model_finishes_its_file(folder: Path, home: Path) -> None:
    llm = LLM(folder, quantization="int4", device="cpu")
    llm.close()
    assert len(kept(home)) == 1 and kept(home)[0].startswith("packed-")


CHILD = """
import os, sys
from quire.core.config import flat_config
from quire.model.build import load_model
from quire.model.load import packed_cache
from quire.ops.backend import open_backend
packed_cache.SMALLEST = 0
config = flat_config(model=sys.argv[1], quantization="int4", device="cpu")
load_model(config, open_backend(config.device))
{end}
"""


@pytest.mark.parametrize("end", one_of(2, ["", "raise SystemExit(3)", "raise KeyboardInterrupt"]))
def test_a_process_that_ends_finishes_its_file(folder: Path, home: Path, end: str) -> None:
    subprocess.run([sys.executable, "-c", CHILD.format(end=end), folder], capture_output=True, timeout=120)
    assert len(kept(home)) == 1 and kept(home)[0].startswith("packed-")


def test_what_a_killed_process_left_is_removed_after_a_while(folder: Path, home: Path) -> None:
    home.mkdir(parents=True)
    fresh, stale = home / ".packed-a.safetensors.1", home / ".packed-b.safetensors.2"
    for path in (fresh, stale):
        path.write_bytes(b"half")
    os.utime(stale, (time.time() - 3600,) * 2)
    load(folder, cache_packed=str(home))
    assert fresh.exists() and not stale.exists()
