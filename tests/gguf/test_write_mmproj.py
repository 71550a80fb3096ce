"""Models with images that are written as two GGUF files: rows and answers are those of the folder, and the file for
images is what another writer makes of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from mmproj_models import OLDER, TYPES, make_source, write_mmproj
from mmproj_pairs import answered, load, rows_of
from often import one_of
from oracle import relative_error
from quire.cli.app import app
from quire.compress.layouts.gguf import write_gguf
from quire.gguf.projector_types import PROJECTORS
from quire.model.describe import describe
from vision_models import SPECIAL, make_vision_model

RENAMED = {"attn_post_norm": "ln2"}
"""What the newest converter calls a norm of Llama 4, which llama.cpp looks for by its older name."""
Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(family: str) -> tuple[Path, Path]:
        root = tmp_path_factory.mktemp(family)
        source, out = root / "source", root / "files"
        out.mkdir()
        make_source(family, source)
        write_gguf(source, out / "tiny.gguf", "F32")
        assert sorted(path.name for path in out.iterdir()) == ["mmproj-tiny-F32.gguf", "tiny.gguf"]
        return source, out

    return cache(make)


def test_every_type_of_file_is_written() -> None:
    assert set(TYPES.values()) == set(PROJECTORS)


@pytest.mark.parametrize("family", TYPES)
def test_rows_of_images_are_those_of_the_folder(family: str, made: Made) -> None:
    source, out = made(family)
    ours, theirs = load(out), load(source)
    assert ours.spec.sight == theirs.spec.sight
    assert relative_error(rows_of(family, ours), rows_of(family, theirs)) <= 1e-5


@pytest.mark.parametrize("family", TYPES)
def test_the_file_is_what_another_writer_makes(family: str, made: Made, tmp_path: Path) -> None:
    source, out = made(family)
    write_mmproj(family, source, tmp_path / "other.gguf")
    ours, theirs = (gguf.GGUFReader(path) for path in (out / "mmproj-tiny-F32.gguf", tmp_path / "other.gguf"))
    one, other = ({t.name: np.array(t.data) for t in file.tensors} for file in (ours, theirs))
    other = {_named(name, family): data for name, data in other.items()}
    copied = one.pop("v.token_embd.img_break", None)
    assert set(one) == set(other) and (copied is not None) == (TYPES[family] == "pixtral")
    if copied is not None:
        assert (copied == embedding_of("[IMG_BREAK]", source)).all()
    assert not [name for name in one if one[name].shape != other[name].shape or (one[name] != other[name]).any()]
    for key in {key for key in theirs.fields if key.startswith("clip.")} - {"clip.vision.projector_type"}:
        if key.endswith("feed_forward_length"):  # which converters fill with numbers of the decoder
            continue
        if key.endswith("head_count") and family == "gemma4_unified":  # which has no heads
            continue
        want, found = (file.fields[key].contents() for file in (theirs, ours))
        assert want == found or np.allclose(want, found), key


def embedding_of(token: str, folder: Path) -> np.ndarray[Any, Any]:
    """The row of the table of tokens that stands for `token`."""
    tensors = load_file(folder / "model.safetensors")
    table = next(tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))
    found: np.ndarray[Any, Any] = table[SPECIAL.index(token)]
    return found


def _named(name: str, family: str) -> str:
    """What a tensor is called by a writer that swaps no names."""
    head, part, ending = ("", *name.rsplit(".", 2))[-3:] if name.count(".") > 1 else ("", name, "")
    if family == "llama4":
        part = RENAMED.get(part, part)
    if family in OLDER:
        part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
    return ".".join(filter(None, (head, part, ending)))


@pytest.mark.parametrize("family", one_of(4, TYPES))
def test_answers_are_those_of_the_folder(family: str, made: Made) -> None:
    source, out = made(family)
    assert answered(out) == answered(source)


def test_the_command_writes_both_files(made: Made, tmp_path: Path) -> None:
    source, _ = made("qwen2_5_vl")
    words = ["compress", str(source), str(tmp_path / "out"), "--quantize", "Q8_0", "--no-passport"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "out").glob("*.gguf"))
    assert files == ["mmproj-source-F16.gguf", "source-Q8_0.gguf"]
    found = describe(str(tmp_path / "out"))
    assert found.vision is not None and found.spec.sight.sections == describe(str(source)).spec.sight.sections
    away = relative_error(rows_of("qwen2_5_vl", load(tmp_path / "out")), rows_of("qwen2_5_vl", load(source)))
    assert 0 < away <= 2e-3


def test_what_the_format_cannot_say_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_source("gemma4", tmp_path / "gemma4")
    path = tmp_path / "gemma4" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_soft_tokens": 70}))
    make_vision_model("llava_onevision", tmp_path / "llava_onevision")
    for family, reason in (
        ("gemma4", "no key of mmproj files says how images are cut as the folder does"),
        ("llava_onevision", "no type of mmproj file is for 'llava_onevision' with siglip_vision_model"),
    ):
        with caplog.at_level(logging.WARNING):
            write_gguf(tmp_path / family, tmp_path / f"{family}.gguf", "F32")
        assert f"{family}.gguf: written without a file for images: {reason}" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("*.gguf")) == ["gemma4.gguf", "llava_onevision.gguf"]
