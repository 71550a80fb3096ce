"""GGUF models with images: rows and answers are those of the folder that both files were written from."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx
import pytest

from mmproj_models import TYPES, with_audio, write_mmproj
from mmproj_pairs import Pair, answered, load, rows_of
from oracle import relative_error
from quire.cli import main
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe, open_model
from quire.store.hub import Hub
from seeing import file_of
from serving_process import serving

FAMILIES = tuple(TYPES)
HALF_SIZES = {"F16": 2e-3, "BF16": 1e-2, "Q8_0": 2e-2}
"""Types of matrices -> how far rows may be from those of F32, relative to their size."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda family: Pair(family, tmp_path_factory.mktemp(family)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_images_are_those_of_the_folder(family: str, made: Callable[[str], Pair]) -> None:
    pair = made(family)
    ours, theirs = load(pair.folder), load(pair.source)
    assert ours.spec.sight == theirs.spec.sight and ours.mmproj == pair.mmproj
    assert relative_error(rows_of(family, ours), rows_of(family, theirs)) <= 1e-5


@pytest.mark.parametrize("kind", HALF_SIZES)
@pytest.mark.parametrize("family", ("gemma3", "qwen2_5_vl", "mistral3"))
def test_every_type_of_numbers_is_read(family: str, kind: str, made: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = made(family)
    write_mmproj(family, pair.source, tmp_path / "half.gguf", kind)
    ours, whole = load(pair.text, mmproj=str(tmp_path / "half.gguf")), load(pair.folder)
    away = relative_error(rows_of(family, ours), rows_of(family, whole))
    assert 0 < away <= HALF_SIZES[kind]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_folder(family: str, made: Callable[[str], Pair]) -> None:
    pair = made(family)
    assert answered(pair.folder) == answered(pair.source)


def test_the_file_is_named_or_lies_in_the_folder_that_is_given(made: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = made("gemma3")
    assert describe(str(pair.folder)).vision == describe(str(pair.text), hub=named(pair.mmproj)).vision is not None
    assert describe(str(pair.text)).vision is None
    assert describe(str(pair.folder), hub=named("")).vision is None
    shutil.copytree(pair.folder, tmp_path / "both")
    shutil.copy(pair.mmproj, tmp_path / "both" / "mmproj-other.gguf")
    found = describe(str(tmp_path / "both"))
    assert found.vision is None and any("mmproj-other.gguf" in note for note in found.notes)


def test_audio_beside_images_is_left_out(made: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = made("gemma3")
    with_audio(pair.mmproj, tmp_path / "both.gguf")
    found = describe(str(pair.text), hub=named(tmp_path / "both.gguf"))
    assert found.vision == describe(str(pair.folder)).vision is not None
    assert any("no audio is taken" in note for note in found.notes)


def named(path: Path | str) -> Hub:
    return Hub(mmproj=str(path))


def test_files_of_other_models_are_refused_with_both_names(made: Callable[[str], Pair], tmp_path: Path) -> None:
    gemma, qwen = made("gemma3"), made("qwen2_vl")
    with pytest.raises(ModelError, match=r"mmproj-tiny.gguf \(gemma3, of tiny\) belongs to a model of gemma3, and "
                                         r"tiny.gguf is one of qwen2vl"):  # fmt: skip
        open_model(str(qwen.text), hub=named(gemma.mmproj))
    with pytest.raises(ConfigError, match="--mmproj is for GGUF files"):
        open_model(str(gemma.source), hub=named(gemma.mmproj))
    with pytest.raises(ModelError, match="--mmproj names beside its model"):
        open_model(str(gemma.mmproj))
    with pytest.raises(ModelError, match="a mmproj file has 'clip'"):
        open_model(str(gemma.text), hub=named(gemma.text))
    with pytest.raises(ModelError, match="is missing"):
        open_model(str(gemma.text), hub=named(tmp_path / "mmproj-none.gguf"))


def test_a_server_of_both_files_takes_images(made: Callable[[str], Pair]) -> None:
    pair = made("qwen2_5_vl")
    picture = base64.b64encode(file_of(size=(130, 90))).decode()
    content = [{"type": "text", "text": "What is this?"},
               {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]  # fmt: skip
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    options = ("--dtype", "float32", "--num-blocks", "1024", "--served-model-name", "m")
    replies = []
    for words in ((str(pair.text), "--mmproj", str(pair.mmproj)), (str(pair.source),)):
        with serving(*words, *options) as url:
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            replies.append((reply.json()["choices"][0]["message"], reply.json()["usage"]))
    assert replies[0] == replies[1]
    assert replies[0][1]["prompt_tokens_details"]["image_tokens"] > 1


def inspected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[bool, str]:
    """Whether `quire inspect` succeeds, and what it shows."""
    monkeypatch.setattr(sys, "argv", ["quire", "inspect", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return not ended.value.code, capsys.readouterr().out


def test_inspect_says_what_a_file_is(
    made: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = made("gemma3")
    runs, shown = inspected(monkeypatch, capsys, str(pair.mmproj))
    assert not runs and "a model of gemma3, with rows of 64 numbers" in shown and "by --mmproj" in shown
    runs, shown = inspected(monkeypatch, capsys, str(pair.text), "--mmproj", str(pair.mmproj))
    assert runs and "gemma3, whose decoder is gemma3_text" in shown
