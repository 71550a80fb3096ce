"""Sparse vectors: SPLADE's weights of transformers' logits, the same bits in any company, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from encoder_models import ENCODERS, say_splade, write_splade
from lora_adapters import merged_by_hand, write_adapter
from paged_model import prompt
from quire import LLM, LoRARequest, PoolingParams, SamplingParams
from quire.core.errors import BadRequest, ModelError, NumericError
from quire.features.pooling.edge_sparse import MODULES, SETTINGS, SparseEmbeddingOutput
from quire.model.describe import open_model
from quire.ops.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
PROMPTS = [prompt(n, n) for n in (1, 7, 16, 64, 65, 100, 131)]
MASKED = tuple(name for name in ENCODERS if name not in ("gemma3_text", "llama"))
Vector = np.ndarray[Any, Any]


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"num_blocks": 512} | options)


def found(llm: LLM, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[SparseEmbeddingOutput]:
    given = [{"prompt_token_ids": each} for each in prompts]
    return [each.outputs for each in llm.embed_sparse(given, use_tqdm=False, **more)]


def dense(sparse: SparseEmbeddingOutput, width: int = 99) -> Vector:
    made = np.zeros(width, np.float32)
    made[sparse.indices] = sparse.values
    return made


def want(model: PreTrainedModel, tokens: list[int], sums: bool = False, twice: bool = False) -> Vector:
    """What sentence-transformers' SpladePooling makes of transformers' logits."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        weights = model(ids, attention_mask=torch.ones_like(ids)).logits[0].relu().log1p()
    weights = weights.log1p() if twice else weights
    made: Vector = (weights.sum(0) if sums else weights.amax(0)).numpy()
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, write_splade(folder, "bert")


@pytest.mark.parametrize("name", MASKED)
def test_weights_are_those_of_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    model = write_splade(tmp_path, name)
    with llm_of(tmp_path) as llm:
        assert llm.info.pooling.kind == "splade" and not llm.info.pooling.generates
        together = found(llm)
    for tokens, sparse in zip(PROMPTS, together, strict=True):
        weights = want(model, tokens)
        assert (weights > 0).sum() > 0 and weights.max() > 0.5
        np.testing.assert_allclose(dense(sparse), weights, atol=1e-5)
        assert sparse.indices == sorted(set(sparse.indices)) and all(value > 0 for value in sparse.values)
    with llm_of(tmp_path, max_num_seqs=1) as llm:
        assert found(llm) == together


@pytest.mark.parametrize("sums", [False, True], ids=["max", "sum"])
@pytest.mark.parametrize("twice", [False, True], ids=["relu", "log1p_relu"])
def test_poolings_of_sentence_transformers(
    bert: tuple[Path, PreTrainedModel], sums: bool, twice: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(bert[0] / name)
    said = {"pooling_strategy": "sum" if sums else "max", "activation_function": "log1p_relu" if twice else "relu"}
    say_splade(folder, **said)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 131}))
    with llm_of(folder) as llm:
        assert llm.info.max_model_len == 131
        together = found(llm)
    for tokens, sparse in zip(PROMPTS, together, strict=True):
        np.testing.assert_allclose(dense(sparse), want(bert[1], tokens, sums, twice), rtol=1e-5, atol=1e-5)
    for options in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 140}, {"block_size": 1},
                    {"max_num_batched_tokens": 4096}):  # fmt: skip
        with llm_of(folder, **options) as llm:
            assert found(llm, PROMPTS[::-1])[::-1] == together


def test_logits_in_pieces_change_no_bit(bert: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    for sums in (False, True):
        with llm_of(bert[0], max_num_seqs=4) as llm:
            step = llm.engine.engine.runner.step
            pooling = step.model.pooling
            monkeypatch.setattr(type(pooling), "splade", type(pooling.splade)(sums=sums))
            whole = found(llm)
            for most in (1, 7, 50):
                monkeypatch.setattr(step, "most_logits", most)
                assert found(llm) == whole


def test_a_text_without_weights_and_logits_that_are_not_finite(tmp_path: Path) -> None:
    write_splade(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    for bias, wrong in ((-1e3, False), (float("nan"), True)):
        kept = load_file(file)
        kept["cls.predictions.bias"].fill_(bias)
        save_file(kept, file, {"format": "pt"})
        with llm_of(tmp_path) as llm:
            if wrong:
                with pytest.raises(NumericError):
                    found(llm)
            else:
                assert found(llm) == [SparseEmbeddingOutput([], [])] * len(PROMPTS)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "gte"])
def test_decoders_of_their_own(name: str, tmp_path: Path) -> None:
    model = write_splade(tmp_path, name, tie_word_embeddings=False)
    assert any(
        "decoder.weight" in key or "projector.weight" in key for key in load_file(tmp_path / "model.safetensors")
    )
    with llm_of(tmp_path) as llm:
        for tokens, sparse in zip(PROMPTS, found(llm), strict=True):
            np.testing.assert_allclose(dense(sparse), want(model, tokens), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["bert", "distilbert", "eurobert"])
def test_made_up_weights_have_all_that_files_have(name: str, tied: bool, tmp_path: Path) -> None:
    write_splade(tmp_path, name, tie_word_embeddings=tied)
    real = open_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    made = open_model(str(tmp_path), "dummy")
    assert made.pooling == real.pooling and made.claim.parts.keys() == real.claim.parts.keys()
    with llm_of(tmp_path, load_format="dummy") as llm:
        assert all(len(each.indices) and np.isfinite(each.values).all() for each in found(llm))


def test_a_tied_decoder_that_is_in_the_files_too(tmp_path: Path) -> None:
    """As older files have it, with the decoder's bias beside the head's."""
    model = write_splade(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    kept = load_file(file)
    kept["cls.predictions.decoder.weight"] = kept["bert.embeddings.word_embeddings.weight"].clone()
    kept["cls.predictions.decoder.bias"] = kept["cls.predictions.bias"].clone()
    save_file(kept, file, {"format": "pt"})
    with llm_of(tmp_path) as llm:
        np.testing.assert_allclose(dense(found(llm)[3]), want(model, PROMPTS[3]), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "modernbert", "eurobert"])
@pytest.mark.parametrize(
    ("options", "least"),
    [({"quantization": "int8", "group_size": 32}, 0.999), ({"quantization": "int4", "group_size": 32}, 0.9),
     ({"dtype": "bfloat16"}, 0.999)],
    ids=["int8", "int4", "bf16"],
)  # fmt: skip
def test_weights_of_few_bits(name: str, options: dict[str, Any], least: float, tmp_path: Path) -> None:
    model = write_splade(tmp_path, name, hidden_size=128, intermediate_size=256)
    with llm_of(tmp_path, **options) as llm:
        together = found(llm)
    for tokens, sparse in zip(PROMPTS, together, strict=True):
        one, other = dense(sparse), want(model, tokens)
        assert float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) > least
    with llm_of(tmp_path, max_num_seqs=1, **options) as llm:
        assert found(llm) == together


def test_adapters_of_the_stack(bert: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, model = bert
    adapter = write_adapter(tmp_path / "adapter", model, ("query", "value", "output.dense"), 7)
    merged = merged_by_hand(model, adapter, 6 / 4)
    with llm_of(folder, enable_lora=True) as llm:
        plain, changed = found(llm), found(llm, lora_request=LoRARequest("one", 1, str(adapter)))
    for tokens, without, each in zip(PROMPTS, plain, changed, strict=True):
        np.testing.assert_allclose(dense(without), want(model, tokens), atol=1e-5)
        np.testing.assert_allclose(dense(each), want(merged, tokens), atol=1e-5)


@pytest.mark.parametrize("kind", ["pooled", "without modules", "bare"])
def test_a_head_that_is_not_used(bert: tuple[Path, PreTrainedModel], kind: str, tmp_path: Path) -> None:
    """Vectors are sparse only where modules.json says so; the error says how it does."""
    folder, model = bert
    kept = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    if kind == "bare":
        kept = {name: tensor for name, tensor in kept.items() if not name.startswith("cls.")}
    if kind == "pooled":
        say_splade(tmp_path, ("Transformer", "Pooling"))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with llm_of(tmp_path) as llm:
        assert (llm.info.pooling.kind, llm.info.pooling.width) == ("mean", 64)
        made = llm.embed([{"prompt_token_ids": PROMPTS[1]}], use_tqdm=False)[0].outputs.embedding
        with torch.no_grad():
            mean = model.base_model(torch.tensor([PROMPTS[1]])).last_hidden_state[0].mean(0)
        want = mean if kind == "pooled" else mean / mean.norm()
        np.testing.assert_allclose(made, want, atol=1e-5)
        with pytest.raises(BadRequest, match="not an embedding model with SPLADE pooling") as refused:
            found(llm)
    if kind != "without modules":
        return
    (tmp_path / "modules.json").write_text(json.dumps(json.loads(MODULES)))
    (tmp_path / "1_SpladePooling").mkdir()
    (tmp_path / "1_SpladePooling" / "config.json").write_text(SETTINGS)
    assert MODULES in refused.value.message and SETTINGS in refused.value.message
    with llm_of(tmp_path) as llm, llm_of(folder) as asked:
        assert found(llm) == found(asked)


def test_refused_with_the_reason(bert: tuple[Path, PreTrainedModel]) -> None:
    tokens = {"prompt_token_ids": [5, 6]}
    with llm_of(bert[0]) as llm:
        for call in (llm.embed, llm.encode):
            with pytest.raises(BadRequest, match="makes sparse vectors"):
                call([tokens], use_tqdm=False)
        with pytest.raises(BadRequest, match="makes sparse vectors"):
            llm.score([tokens], [tokens], use_tqdm=False)
        with pytest.raises(BadRequest, match="normalize: is not available"):
            found(llm, pooling_params=PoolingParams(normalize=True))
        with pytest.raises(BadRequest, match="dimensions: is not available"):
            found(llm, pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(BadRequest, match="fills in masked tokens"):
            llm.generate([tokens], SamplingParams(detokenize=False), use_tqdm=False)


@pytest.mark.parametrize(
    ("kinds", "said", "words"),
    [
        (("Router",), {}, "'Router': queries and documents are read in different ways"),
        (("SparseStaticEmbedding",), {}, "'SparseStaticEmbedding': weights of tokens come from a table"),
        (("MLMTransformer", "SpladePooling", "SparseAutoEncoder"), {}, "'SparseAutoEncoder' behind"),
        (("MLMTransformer", "SpladePooling"), {"pooling_strategy": "mean"}, "needs a pooling_strategy of max, sum"),
        (("MLMTransformer", "SpladePooling"), {"activation_function": "gelu"}, "activation_function of relu, log1p"),
        (("MLMTransformer", "SpladePooling"), {"lost": True}, "no masked-language-model head"),
        (("MLMTransformer", "SpladePooling", "Normalize"), {}, "layers beside its 'SpladePooling'"),
    ],
    ids=range(7),
)
def test_folders_that_are_refused(
    bert: tuple[Path, PreTrainedModel], kinds: tuple[str, ...], said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    kept = load_file(bert[0] / "model.safetensors")
    if said.pop("lost", False):
        kept = {name: tensor for name, tensor in kept.items() if not name.startswith("cls.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((bert[0] / "config.json").read_bytes())
    say_splade(tmp_path, kinds, **said)
    with pytest.raises(ModelError, match=words):
        llm_of(tmp_path)
