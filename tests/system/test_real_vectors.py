"""Vectors of all-MiniLM-L6-v2's real weights are those of sentence-transformers: `make real`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paths import SUPPORT
from quire.bench.suite.environments import SENTENCE_TRANSFORMERS
from quire.engine.llm import LLM
from quire.text.shortening import shortened
from real_figures import note, spearman
from real_texts import PAIRS, texts
from real_weights import real_model, tool

pytestmark = pytest.mark.real
Vectors = NDArray[np.float32]
TEXTS = texts()
GRADED = [sentence for _, *pair in PAIRS for sentence in pair]
FORMATS: dict[str, tuple[dict[str, Any], float, float]] = {
    "float32": ({"dtype": "float32"}, 0.99999, 1e-3),
    "int8, activations int16": ({"quantization": "int8", "activations": "int16"}, 0.999, 1e-3),
    "int8": ({"quantization": "int8"}, 0.997, 2e-3),
}
"""Options, the least cosine with sentence-transformers' vector, and how far the rank correlation may be from theirs."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    """sentence-transformers' vectors of `TEXTS` and then of `GRADED`."""
    env, model, folder = tool("sentence_transformers"), real_model("all-minilm"), tmp_path_factory.mktemp("theirs")
    (folder / "texts.json").write_text(json.dumps(TEXTS + GRADED))
    script = [SUPPORT / "real_vectors.py", model, folder / "texts.json", folder / "out.npy"]
    subprocess.run([env.python, *map(str, script)], check=True, cwd=folder)
    found: Vectors = np.load(folder / "out.npy")
    return found


def ours(model: Path, options: dict[str, Any]) -> tuple[Vectors, list[int]]:
    """Our vectors of the same, and how many tokens each text has."""
    with LLM(str(model), device="cpu", **options) as llm:
        tokenizer, limit = llm.get_tokenizer(), llm.info.max_model_len
        assert limit == 256
        tokens = [tokenizer.encode(text) for text in TEXTS + GRADED]
        prompts = [{"prompt_token_ids": shortened(tokenizer, text, ids, limit, False)}
                   for text, ids in zip(TEXTS + GRADED, tokens, strict=True)]  # fmt: skip
        found = llm.embed(prompts, use_tqdm=False)
    return np.array([each.outputs.embedding for each in found], np.float32), [len(ids) for ids in tokens]


def similarities(vectors: Vectors) -> Vectors:
    """The cosine of each pair of `PAIRS`."""
    one, other = vectors[len(TEXTS) :: 2], vectors[len(TEXTS) + 1 :: 2]
    made: Vectors = (one * other).sum(1)
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_vectors_are_those_of_sentence_transformers(theirs: Vectors, name: str) -> None:
    options, least, near = FORMATS[name]
    found, lengths = ours(real_model("all-minilm"), options)
    assert len(set(TEXTS)) == 1000 and max(lengths) > 256 > 3 >= min(lengths)
    for vectors in (found, theirs):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    cosines = (found.astype(np.float64) * theirs).sum(1)
    grades = np.array([grade for grade, *_ in PAIRS])
    mine, other = (spearman(similarities(vectors), grades) for vectors in (found, theirs))
    note(f"vectors {name}", {
        "texts": len(TEXTS), "sentences": len(GRADED), "tokens": sum(min(256, length) for length in lengths),
        "cut": sum(length > 256 for length in lengths), "least_cosine": cosines.min(), "mean_cosine": cosines.mean(),
        "below_0.999": int((cosines < 0.999).sum()), "largest_difference": float(np.abs(found - theirs).max()),
        "pairs": len(PAIRS), "spearman": mine, "their_spearman": other,
        "spearman_with_theirs": spearman(similarities(found), similarities(theirs)),
        "sentence_transformers": SENTENCE_TRANSFORMERS,
    })  # fmt: skip
    worst = int(cosines.argmin())
    assert cosines[worst] >= least, (worst, (TEXTS + GRADED)[worst])
    assert other > 0.8, "the grades are those of meanings"
    assert abs(mine - other) <= near
