"""GGUF files of models with latent attention: older ones, packed formats, ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

import gguf_latents  # noqa: E402
from gguf_families import FAMILIES  # noqa: E402
from gguf_models import write_gguf  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.model.build import load_model  # noqa: E402
from quire.model.describe import describe  # noqa: E402

TOKENS = prompt(19, 1)
NAMES = ("deepseek2", "deepseek2 third", "kimi-linear")


def found(path: Path, device: str, **options: Any) -> Any:
    model = load_model(flat_config(model=str(path), dtype="float32", **options), backend(device))
    return Paged(model, [TOKENS]).run([[len(TOKENS)]])[0]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2 third"])
def test_older_files_with_one_matrix_of_keys_and_values(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_latents, "OLDER", True)
    kind, facts = FAMILIES[name]
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, kind, **facts)
    assert describe(str(path)).spec.family == kind
    assert relative_error(found(path, device), logits(oracle, TOKENS)) <= 1e-5


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_files(name: str, device: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[name]
    wide = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 128}
    wide |= {"moe_intermediate_size": 64} | ({"q_lora_rank": 64} if facts["q_lora_rank"] else {})
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, kind, lambda tensor: Type.Q8_0, **facts | wide)
    assert describe(str(path)).scheme == "gguf Q8_0"
    assert relative_error(found(path, device, activations="int16"), logits(oracle, TOKENS)) <= 2e-3


def wide_turn(writer: Any) -> None:
    """Say that more turns than a head has."""
    writer.kv_data[0]["deepseek2.rope.dimension_count"].value = 64


def other_scores(writer: Any) -> None:
    """Say that experts are scored by a function that such models do not have."""
    writer.kv_data[0]["kimi-linear.expert_gating_func"].value = 1


def test_what_no_such_model_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kind, facts = FAMILIES["deepseek2"]
    write_gguf(path, kind, edit=wide_turn, **facts)
    with pytest.raises(ModelError, match=r"deepseek2\.attention\.key_length_mla: is 32, of which 64 turn"):
        describe(str(path))
    kind, facts = FAMILIES["kimi-linear"]
    write_gguf(path, kind, edit=other_scores, **facts)
    with pytest.raises(ModelError, match=r"kimi-linear\.expert_gating_func: is 1, 2 is what kimi-linear models have"):
        describe(str(path))
