"""GGUF files with a layer for multi-token prediction, named as llama.cpp's converter names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

from engine_answers import engine_of  # noqa: E402
from gguf_families import GLM  # noqa: E402
from gguf_models import GPT_OSS_ROLES, write_gguf  # noqa: E402
from mtp_drafts import check_drafts  # noqa: E402
from mtp_models import MtpLayer  # noqa: E402
from oracle import BACKENDS, random_model  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.model.describe import describe  # noqa: E402

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
FACTS = GLM | {"max_position_embeddings": 256}
NEXTN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm",
         "embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head"}  # fmt: skip


def named(layer: MtpLayer) -> Iterator[tuple[str, Tensor]]:
    """The layer's tensors under the format's names; each matrix of all experts is one."""
    start, stacks = f"model.layers.{layer.model.config.num_hidden_layers}.", dict[str, list[Tensor]]()
    block = f"blk.{layer.model.config.num_hidden_layers}."
    for name, tensor in layer.tensors().items():
        base, _, suffix = name.removeprefix(start).rpartition(".")
        if base.startswith("mlp.experts."):
            stacks.setdefault(base.split(".")[-1].removesuffix("_proj"), []).append(tensor)
        elif suffix == "e_score_correction_bias":
            yield f"{block}exp_probs_b.bias", tensor
        else:
            yield f"{block}{'nextn.' + NEXTN[base] if base in NEXTN else GPT_OSS_ROLES[base]}.{suffix}", tensor
    for part, experts in stacks.items():
        yield f"{block}ffn_{part}_exps.weight", torch.stack(experts)


def written(path: Path, without: str = "", kind: Type | None = None, blocks: int = 1) -> MtpLayer:
    """Write a file with the layer, less its tensor `without`; matrices of `kind`. `blocks`: layers it says to have."""
    layer = MtpLayer.of(random_model("glm4_moe", **FACTS), torch.float32)

    def further(writer: Any) -> None:
        writer.kv_data[0]["glm4moe.block_count"].value += 1
        for name, tensor in named(layer):
            if name.endswith(without or "."):
                continue
            plain = kind is None or tensor.dim() < 2 or "gate_inp" in name
            array = tensor.contiguous().numpy()
            writer.add_tensor(
                name, array if plain else gguf.quants.quantize(array, kind), raw_dtype=None if plain else kind
            )

    layer.model = write_gguf(
        path, "glm4_moe", lambda name: kind, further, {"nextn_predict_layers": blocks, "expert_gating_func": 2}, **FACTS
    )
    return layer


def test_the_logits_are_those_of_the_formula(tmp_path: Path) -> None:
    layer = written(tmp_path / "model.gguf")
    found = describe(str(tmp_path / "model.gguf"))
    assert found.spec.layers == layer.model.config.num_hidden_layers and found.mtp is not None
    check_drafts(layer, tmp_path / "model.gguf")


def test_a_quantized_layer_drafts(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", kind=Type.Q8_0)
    engine = engine_of(model=str(tmp_path / "model.gguf")).engine
    assert engine.speculator is not None
    model = engine.speculator.proposer._step.model  # type: ignore[attr-defined]
    assert any("Q8_0" in kind or "int8" in kind for kind, _ in model.report.values()), model.report


def test_a_file_without_all_of_the_layer_serves_the_model(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", without="nextn.hnorm.weight")
    assert engine_of(model=str(tmp_path / "model.gguf")).engine.speculator is None
    (note,) = (note for note in describe(str(tmp_path / "model.gguf")).notes if "multi-token" in note)
    assert "blk.3.nextn.hnorm.weight" in note


def test_more_such_layers_than_blocks_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", blocks=4)
    with pytest.raises(ModelError, match=r"glm4moe\.nextn_predict_layers: is 4, needs a number of 4 blocks"):
        describe(str(tmp_path / "model.gguf"))
