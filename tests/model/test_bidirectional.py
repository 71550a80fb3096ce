"""Encoders: vectors equal transformers' rows, the same bits in any company, and what cannot be is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from encoder_models import ENCODERS, rows, write_encoder, write_tokenizer
from lora_adapters import merged_by_hand, write_adapter
from oracle import edit_config
from paged_model import prompt
from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import BadRequest, ConfigError, ModelError
from quire.features.pooling.edge_embedding import PoolingParams
from quire.ops.native import load_native
from quire.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
PROMPTS = [prompt(n, n) for n in (1, 7, 16, 64, 65, 100, 131)]
Made = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=ENCODERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("encoder")
    return folder, write_encoder(folder, request.param)


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"num_blocks": 512} | options)


def vectors(llm: LLM, prompts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    found = llm.encode([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
    return [each.outputs.data for each in found]


def test_vectors_are_rows_of_transformers(made: Made) -> None:
    folder, model = made
    with llm_of(folder) as llm:
        for tokens, found in zip(PROMPTS, vectors(llm, PROMPTS), strict=True):
            want = rows(model, tokens).mean(0)
            want = want / want.norm()
            np.testing.assert_allclose(found, want.numpy(), atol=1e-5)


def test_company_and_steps_change_no_bit(made: Made) -> None:
    folder, _ = made
    with llm_of(folder, max_num_seqs=1) as one:
        alone = vectors(one, PROMPTS)
        vectors(one, [tokens[::-1] for tokens in PROMPTS])
        replayed = vectors(one, PROMPTS)
        assert all(np.array_equal(first, later) for first, later in zip(alone, replayed, strict=True))
    for options in ({}, {"max_num_batched_tokens": 140}, {"block_size": 1}, {"num_blocks": 24, "max_model_len": 131}):
        with llm_of(folder, **options) as llm:
            for one_of, found in zip(alone, vectors(llm, PROMPTS[::-1])[::-1], strict=True):
                assert np.array_equal(one_of, found)
            assert llm.info.max_model_len


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic_bert", "gte"])
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.95)])
def test_weights_of_few_bits(name: str, quantization: str, least: float, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name, hidden_size=128, intermediate_size=256)
    with llm_of(tmp_path, quantization=quantization, group_size=32) as llm:
        for tokens, found in zip(PROMPTS, vectors(llm, PROMPTS), strict=True):
            want = rows(model, tokens).mean(0)
            assert float(torch.tensor(found) @ want / want.norm()) > least


def test_refused_with_the_reason(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    with llm_of(tmp_path) as llm:
        with pytest.raises(BadRequest, match="makes vectors"):
            llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(detokenize=False), use_tqdm=False)
        with pytest.raises(BadRequest, match="reads 140"):
            vectors(llm, [prompt(141, 0)])
    for options, why in (
        ({"speculative_config": {"method": "ngram"}}, "nothing is drafted"),
        ({"target_itl_ms": 20.0}, "reads them whole"),
        ({"context_parallel_size": 2}, "later tokens"),
    ):
        with pytest.raises((ConfigError, ModelError), match=why):
            llm_of(tmp_path, **options)


CLASSIFIERS = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "eurobert", "nomic_bert", "gte",
               "jina_embeddings_v3")  # fmt: skip


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_are_those_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    more = {"classifier_pooling": "mean"} if name in ("modernbert", "eurobert") else {}
    model = write_encoder(tmp_path, name, "ForSequenceClassification", num_labels=labels, **more)
    with llm_of(tmp_path) as llm:
        for tokens, found in zip(PROMPTS, vectors(llm, PROMPTS), strict=True):
            ids = torch.tensor([tokens])
            with torch.no_grad():
                logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0]
            want = logits.sigmoid() if labels == 1 else logits.softmax(0)
            np.testing.assert_allclose(found, want.numpy(), atol=1e-5)


def test_dense_layers_of_sentence_transformers(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "gemma3_text")
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    said = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(parts.items())]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(said))
    for path in ("1_Pooling", "2_Dense"):
        (tmp_path / path).mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    dense = {"in_features": 64, "out_features": 24, "bias": True,
             "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    torch.manual_seed(5)
    layer = torch.nn.Linear(64, 24)
    kept = {f"linear.{name}": p.detach() for name, p in layer.named_parameters()}
    save_file(kept, tmp_path / "2_Dense" / "model.safetensors")
    with llm_of(tmp_path) as llm:
        assert llm.info.max_model_len == 100
        assert llm.info.pooling.width == 24
        for tokens, found in zip(PROMPTS, vectors(llm, [each[:100] for each in PROMPTS]), strict=True):
            with torch.no_grad():
                want = layer(rows(model, tokens[:100]).mean(0)).tanh()
            np.testing.assert_allclose(found, (want / want.norm()).numpy(), atol=1e-5)


QUERY, TEXTS = "how many live in berlin?", ["the cats sat on a mat.", "berlin", "in berlin live many " * 20]


@pytest.mark.parametrize("raw", [False, True])
def test_pairs_are_scored_as_cross_encoders_do(raw: bool, tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"} if raw else {}
    model = write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    edit_config(tmp_path, sentence_transformers=identity)
    write_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with llm_of(tmp_path) as llm:
        found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
        for text, score in zip(TEXTS, found, strict=True):
            with torch.no_grad():
                logit = model(**theirs(QUERY, text, return_tensors="pt")).logits[0, 0]
            assert score == pytest.approx(float(logit if raw else logit.sigmoid()), abs=1e-5)
        for limit in (1, 3, 8, 21, 60):
            cut = theirs(QUERY, TEXTS[2], truncation=True, max_length=max(limit, 3)) if limit > 3 else None
            ids, second = llm.get_tokenizer().encode_pair(QUERY, TEXTS[2], limit)
            if cut is not None:
                assert ids == cut["input_ids"]
                assert second == cut["token_type_ids"].index(1)
            else:
                assert len(ids) == 3


@pytest.mark.parametrize("name", ["nomic_bert", "gte"])
def test_second_texts_turn_as_first_ones(name: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name, "ForSequenceClassification", num_labels=1, type_vocab_size=2)
    write_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with llm_of(tmp_path) as llm:
        for text, found in zip(TEXTS, llm.score(QUERY, TEXTS, use_tqdm=False), strict=True):
            with torch.no_grad():
                logit = model(**theirs(QUERY, text, return_tensors="pt")).logits[0, 0]
            assert found.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_positions_that_tell_types_are_not_stretched(tmp_path: Path) -> None:
    write_encoder(tmp_path, "nomic_bert")
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}
    edit_config(tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match="more than this model's 140 positions"):
        llm_of(tmp_path, max_model_len=400)


def test_texts_of_a_pair_are_cut_as_transformers_does(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for one, other, limit in itertools.product(range(6), range(6), range(4, 14)):
        pair = " ".join(["cat"] * one), " ".join(["mat"] * other)
        want = theirs([pair], truncation=True, max_length=limit)["input_ids"][0]
        assert ours.encode_pair(*pair, limit)[0] == want, (one, other, limit)


def test_prompts_of_tasks_stand_before_texts(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    write_tokenizer(tmp_path)
    said = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    with llm_of(tmp_path) as llm:

        def embedded(text: str, name: str | None = None) -> list[float]:
            found: list[float] = llm.embed([text], PoolingParams(prompt_name=name), False)[0].outputs.embedding
            return found

        assert embedded("a cat") == embedded("query: a cat", "") == embedded("a cat", "query")
        assert embedded("a cat", "document") == embedded("a cat", "")
        assert embedded("a cat", "") != embedded("a cat")
        scored, one, two = llm.score("a cat", "berlin", False)[0], embedded("a cat"), embedded("berlin")
        assert scored.outputs.score == pytest.approx(float(np.dot(one, two)), abs=1e-6)
        with pytest.raises(BadRequest, match="it has query, document"):
            embedded("a cat", "passage")


LORA_TARGETS = {
    "bert": ("query", "value", "intermediate.dense", "output.dense"),
    "roberta": ("key", "attention.output.dense"),
    "distilbert": ("q_lin", "v_lin", "lin1", "lin2"),
    "mpnet": ("attn.q", "attn.o"),
    "modernbert": ("Wqkv", "Wo", "Wi"),
    "eurobert": ("q_proj", "down_proj"),
}


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_adapters_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "base", name)
    adapter = write_adapter(tmp_path / "adapter", model, LORA_TARGETS[name], 7)
    merged = merged_by_hand(model, adapter, 6 / 4)
    with llm_of(tmp_path / "base", enable_lora=True) as llm:
        given = [{"prompt_token_ids": each} for each in PROMPTS]
        plain = vectors(llm, PROMPTS)
        found = llm.encode(given, use_tqdm=False, lora_request=LoRARequest("one", 1, str(adapter)))
        for tokens, without, each in zip(PROMPTS, plain, found, strict=True):
            for oracle, vector in ((model, without), (merged, each.outputs.data)):
                want = rows(oracle, tokens).mean(0)
                np.testing.assert_allclose(vector, (want / want.norm()).numpy(), atol=1e-5)
