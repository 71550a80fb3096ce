"""GGUF files with a layer for multi-token prediction, named as llama.cpp's converter names it: read, and written."""

from __future__ import annotations

import logging
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
from gguf_writing import SHAPE, add_tokenizer, byte_level  # noqa: E402
from mtp_drafts import ALWAYS, check_drafts  # noqa: E402
from mtp_models import MtpLayer, write_mtp  # noqa: E402
from oracle import BACKENDS, random_model  # noqa: E402
from quire.compress.layouts.gguf import write_gguf as write_folder  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.gguf.file import GgufFile  # noqa: E402
from quire.model.describe import describe  # noqa: E402
from speculation_methods import answers, requests_of  # noqa: E402
from ways_to_serve import differing  # noqa: E402

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


ONES = {"vocab_size": SHAPE["vocab_size"]}
WRITTEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "mimo_v2_flash", "exaone_moe", "bailing_moe_v2",
           "dots3_note")  # fmt: skip
"""Those whose files are written, of the families with such a layer."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_written_file_drafts_as_its_folder_does(kind: str, tmp_path: Path) -> None:
    layer, path = write_mtp(tmp_path, kind, **ONES), tmp_path / "model.gguf"
    add_tokenizer(tmp_path, byte_level())
    write_folder(tmp_path, path, "F32")
    found, blocks = describe(str(path)), layer.model.config.num_hidden_layers
    assert found.mtp is not None and found.spec.layers == blocks and not found.notes
    assert found.mtp.parameters == describe(str(tmp_path)).mtp.parameters  # type: ignore[union-attr]
    metadata = GgufFile(path).metadata
    name = metadata["general.architecture"]
    assert (metadata[f"{name}.block_count"], metadata[f"{name}.nextn_predict_layers"]) == (blocks + 1, 1)
    recurrent = metadata.get(f"{name}.attention.recurrent_layers")
    assert recurrent is None or (len(recurrent) == blocks + 1 and not recurrent[-1])
    check_drafts(layer, path)
    options = {"dtype": "float32", "speculative_config": ALWAYS}
    ours, theirs = (engine_of(model=str(one), **options) for one in (path, tmp_path))
    requests = requests_of(99, "")
    got, want = answers(ours, requests), answers(theirs, requests)
    assert kind != "glm4_moe" or not differing(got, want)  # in others -exp(A) and 1 + norm are rounded by the writer
    for name, rows in want.items():
        for mine, one in zip(got[name], rows, strict=True):
            assert (mine.tokens, mine.reason) == (one.tokens, one.reason)
            near = [lp.logprob for lp in one.logprobs]
            assert [lp.logprob for lp in mine.logprobs] == pytest.approx(near, rel=1e-5, abs=1e-5)
    mine, its = (engine.engine.speculator for engine in (ours, theirs))
    assert mine is not None and its is not None and mine.totals == its.totals and mine.totals.tokens > 0


def test_a_written_file_is_quantized_with_its_layer(tmp_path: Path) -> None:
    write_mtp(tmp_path, "glm4_moe", **ONES)
    add_tokenizer(tmp_path, byte_level())
    write_folder(tmp_path, tmp_path / "model.gguf", "Q8_0")
    kinds = {name: tensor.type.name for name, tensor in GgufFile(tmp_path / "model.gguf").tensors.items()}
    assert kinds["blk.3.nextn.eh_proj.weight"] == kinds["blk.3.attn_q.weight"] == "Q8_0"
    assert kinds["blk.3.nextn.enorm.weight"] == "F32"
    assert engine_of(model=str(tmp_path / "model.gguf")).engine.speculator is not None


def test_what_is_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    write_mtp(tmp_path, "qwen3_5", **ONES)
    add_tokenizer(tmp_path, byte_level())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if name != "mtp.norm.weight"}
    save_file(kept, str(tmp_path / "model.safetensors"), {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        write_folder(tmp_path, tmp_path / "model.gguf", "F32")
    assert "model.gguf: written without the layer that drafts: " in caplog.text and "mtp.norm.weight" in caplog.text
    assert describe(str(tmp_path / "model.gguf")).mtp is None
