"""Files of two parts as llama.cpp's converter writes them of the folders of transformers: read, and equal to ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from llama_cpp_peer import ENVIRONMENT
from llama_cpp_peer import pytestmark as pytestmark
from mmproj_models import OLDER, TYPES, write_mmproj
from mmproj_pairs import Pair, answered, load, rows_of
from oracle import relative_error
from paths import SUPPORT
from quire.model.vision.mmproj_tensors import AUDIO

HALVED = ("gemma3",)
"""Families of which the converter writes a matrix as F16 whatever the format."""
INVENTED = {"clip.vision.attention.layer_norm_epsilon", "clip.vision.feed_forward_length"}
"""Keys that the converter fills with numbers of the decoder."""


@pytest.fixture(scope="module", params=[family for family in TYPES if family not in OLDER])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A family's folder, and the file that the converter makes of it beside that of its decoder."""
    made = Pair(request.param, tmp_path_factory.mktemp(request.param))
    made.mmproj.unlink()
    command = {"folder": str(made.source), "out": str(made.mmproj), "mmproj": True}
    sources = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp"))
    script = [sys.executable, str(SUPPORT / "llama_cpp_convert.py"), str(sources)]
    done = subprocess.run(script, input=json.dumps(command), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return made


def test_rows_and_answers_are_those_of_the_folder(pair: Pair) -> None:
    ours, theirs = load(pair.folder), load(pair.source)
    away = relative_error(rows_of(pair.family, ours), rows_of(pair.family, theirs))
    assert away <= (1e-3 if pair.family in HALVED else 1e-5)
    assert answered(pair.folder) == answered(pair.source)


def test_what_tests_write_is_what_the_converter_writes(pair: Pair, tmp_path: Path) -> None:
    write_mmproj(pair.family, pair.source, tmp_path / "ours.gguf")
    theirs, ours = (gguf.GGUFReader(path) for path in (pair.mmproj, tmp_path / "ours.gguf"))
    one, other = ({t.name: np.array(t.data).squeeze() for t in file.tensors} for file in (theirs, ours))
    one = {name: data for name, data in one.items() if not name.startswith(AUDIO)}
    assert set(one) - {"v.token_embd.img_break"} == set(other)
    assert not [name for name in other if not np.allclose(one[name], other[name], rtol=1e-3, atol=1e-6)]
    for key in {key for key in theirs.fields if key.startswith("clip.") and "audio" not in key} - INVENTED:
        want, found = (file.fields[key].contents() for file in (theirs, ours))
        assert want == found or np.allclose(want, found), key
