"""Encoders as GGUF files: what is written gives the vectors, the classes and the pairs of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import processors

from encoder_models import write_tokenizer
from family_tensors import rewrite
from gguf_encoder_models import CONVERTED, MADE, write_dense, write_model
from gguf_vocabularies import unigrams, wordpiece
from gguf_writing import VOCAB, add_tokenizer, byte_level
from oracle import edit_config
from paged_model import prompt
from quire import LLM
from quire.compress.layouts.gguf import write_gguf
from quire.core.errors import ConfigError, ModelError
from quire.gguf.file import GgufFile
from quire.gguf.writer import NewTensor, write_file
from quire.model.describe import open_model
from quire.ops.native import load_native
from quire.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
PROMPTS = [prompt(n, n) for n in (1, 7, 64, 127)]
QUERY, TEXTS = "how many live in berlin?", ["the cats sat on a mat.", "berlin", "in berlin live many " * 20]
BEFORE = {"bert": "tanh", "roberta": "tanh", "modern-bert": "gelu"}


def llm_of(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", **{"num_blocks": 512, "dtype": "float32"} | options)


def vectors(path: Path, **options: Any) -> np.ndarray[Any, Any]:
    with llm_of(path, **options) as llm:
        found = llm.encode([{"prompt_token_ids": each} for each in PROMPTS], use_tqdm=False)
    return np.stack([each.outputs.data for each in found])


def written(folder: Path, name: str, ends: str = "Model", kind: str = "F32", **facts: Any) -> Path:
    """The file of such a model, whose folder is `folder`."""
    write_model(folder, name, ends, vocab_size=VOCAB, **facts)
    add_tokenizer(
        folder, unigrams() if name == "xlm-roberta" else byte_level("gpt-2") if name == "roberta" else wordpiece()
    )
    path = folder.parent / f"{kind}.gguf"
    write_gguf(folder, path, kind)
    return path


@pytest.mark.parametrize("name", CONVERTED | MADE)
def test_files_give_the_vectors_of_folders(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model", name)
    np.testing.assert_array_equal(vectors(path), vectors(tmp_path / "model"))


@pytest.mark.parametrize("name", ["bert", "roberta", "modern-bert"])
def test_blocks_of_few_bits(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model", name, kind="Q8_0")
    assert ((vectors(path) * vectors(tmp_path / "model")).sum(1) > 0.999).all()


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", BEFORE)
def test_files_give_the_classes_of_folders(name: str, labels: int, tmp_path: Path) -> None:
    path = written(tmp_path / "model", name, "ForSequenceClassification", num_labels=labels)
    opened, own = open_model(str(path)).pooling, open_model(str(tmp_path / "model")).pooling
    assert (opened.kind, opened.labels) == (own.kind, own.labels)
    np.testing.assert_array_equal(vectors(path), vectors(tmp_path / "model"))


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_pooling_is_written_and_read(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "bert", vocab_size=VOCAB)
    write_dense(folder, mode=mode)
    add_tokenizer(folder, wordpiece())
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    assert open_model(str(tmp_path / "model.gguf")).pooling.kind == open_model(str(folder)).pooling.kind
    np.testing.assert_array_equal(vectors(tmp_path / "model.gguf"), vectors(folder))


def test_pairs_are_those_of_the_folder(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    write_model(folder, "bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    write_gguf(folder, path, "F32")
    with llm_of(folder) as own, llm_of(path) as llm:
        for text in TEXTS:
            for limit in (0, 5, 21):
                pair = own.get_tokenizer().encode_pair(QUERY, text, limit)
                assert llm.get_tokenizer().encode_pair(QUERY, text, limit) == pair
                assert pair[1] > 0
        scores = [[each.outputs.score for each in one.score(QUERY, TEXTS, use_tqdm=False)] for one in (own, llm)]
    assert scores[0] == scores[1]


def test_dense_layers_are_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "gemma-embedding", vocab_size=VOCAB)
    write_dense(folder, 64, 96, 64)
    add_tokenizer(folder, byte_level("gpt-2"))
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    np.testing.assert_array_equal(vectors(tmp_path / "model.gguf"), vectors(folder))


@pytest.mark.parametrize(
    ("name", "ends", "facts", "why"),
    [
        ("distilbert", "ForSequenceClassification", {}, "take tanh before classes, not relu"),
        ("nomic-bert", "ForSequenceClassification", {}, "no place for its classes"),
        ("bert", "ForSequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"},
         "several of its classes"),
        ("modern-bert", "Model", {"attention_bias": True}, "reads no .*bias"),
        ("modern-bert", "Model", {"norm_bias": True}, "reads no .*bias"),
        ("eurobert", "Model", {"mlp_bias": True}, "reads no .*bias"),
        ("bert", "Model", {"hidden_act": "relu"}, "no key for the model's activation"),
    ],
)  # fmt: skip
def test_what_files_cannot_hold_is_refused(
    name: str, ends: str, facts: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        written(tmp_path / "model", name, ends, **facts)


def test_a_dense_layer_of_another_family_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "bert", vocab_size=VOCAB)
    write_dense(tmp_path / "model", 64, 32)
    add_tokenizer(tmp_path / "model", wordpiece())
    with pytest.raises(ConfigError, match="1 dense layers behind the pooled row"):
        write_gguf(tmp_path / "model", tmp_path / "model.gguf", "F32")


def rewritten(path: Path, **facts: Any) -> Path:
    """The file with other metadata."""
    file = GgufFile(path)
    tensors = [NewTensor(t.name, t.type.name, t.shape) for t in file.tensors.values()]
    data = [np.frombuffer(file.data, "u1", t.nbytes, t.start) for t in file.tensors.values()]
    out = path.with_name("other.gguf")
    plain = (str, int, float, np.ndarray)
    metadata = {key: value if isinstance(value, plain) else list(value) for key, value in file.metadata.items()}
    write_file(out, metadata | facts, tensors, data)
    return out


def test_metadata_that_contradict_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model", "bert")
    for facts, why in (
        ({"bert.pooling_type": 9}, "pooling_type: is 9"),
        ({"bert.attention.causal": True}, "attention.causal: is True"),
    ):
        with pytest.raises(ModelError, match=why):
            open_model(str(rewritten(path, **facts)))
    opened = open_model(str(rewritten(path, **{"bert.pooling_type": 4})))
    assert "no matrix of them" in opened.pooling.refused


def test_a_label_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "bert", "ForSequenceClassification", vocab_size=VOCAB, num_labels=2)
    edit_config(folder, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    add_tokenizer(folder, wordpiece())
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    assert open_model(str(tmp_path / "model.gguf")).pooling.labels == ("bad", "good")


def rows_of_nomic(tensors: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Rows [T, 64] of four layers of `gguf_encoder_models.experts`, as the code of its releases makes them."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(tokens))[:, None] / 1000 ** (torch.arange(8) / 8)
        cos, sin = (f(torch.cat((angles, angles), 1))[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin

    x = tensors["embeddings.word_embeddings.weight"][tokens] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "emb_ln")
    for i in range(4):
        own = {name.removeprefix(f"encoder.layers.{i}."): t for name, t in tensors.items()}
        q, k, v = (x @ own["attn.Wqkv.weight"].T + own["attn.Wqkv.bias"]).view(len(tokens), 3, 4, 16).unbind(1)
        q, k, v = (each.transpose(0, 1) for each in (turned(q), turned(k), v))
        mixed = ((q @ k.transpose(1, 2) / 4).softmax(-1) @ v).transpose(0, 1).reshape(len(tokens), 64)
        x = normed(x + mixed @ own["attn.out_proj.weight"].T + own["attn.out_proj.bias"], f"encoder.layers.{i}.norm1")
        if i % 2:
            scores, chosen = (x @ own["mlp.router.layer.weight"].T).softmax(-1).topk(2)
            up, down = (own[f"mlp.experts.mlp.{name}"].view(4, 96, 64) for name in ("w1", "w2"))
            each = torch.einsum("tef,efh->teh", F.gelu(torch.einsum("th,efh->tef", x, up)), down)
            made = (each.gather(1, chosen[..., None].expand(-1, -1, 64)) * scores[..., None]).sum(1)
            made = made + own.get("mlp.experts.bias", torch.zeros(64))
        else:
            made = F.gelu(x @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"]) @ own["mlp.fc2.weight"].T
            made = made + own["mlp.fc2.bias"]
        x = normed(x + made, f"encoder.layers.{i}.norm2")
    return x


@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_nomic(biased: bool, tmp_path: Path) -> None:
    """transformers has none of these; the bias behind all experts has no place in GGUF."""
    folder = tmp_path / "model"
    write_model(folder, "nomic-bert-moe", vocab_size=VOCAB)
    if biased:
        more = {f"encoder.layers.{i}.mlp.experts.bias": torch.linspace(-1, 1, 64) for i in (1, 3)}
        rewrite(folder, lambda tensors: tensors | more)
    tensors = load_file(folder / "model.safetensors")
    for tokens, found in zip(PROMPTS, vectors(folder), strict=True):
        want = rows_of_nomic(tensors, tokens).mean(0)
        np.testing.assert_allclose(found, (want / want.norm()).numpy(), atol=1e-5)
    if biased:
        add_tokenizer(folder, wordpiece())
        with pytest.raises(ConfigError, match=r"mlp.experts.* has no name in GGUF"):
            write_gguf(folder, tmp_path / "model.gguf", "F32")


def test_slopes_of_jina_2_go_both_ways(tmp_path: Path) -> None:
    """transformers has it not."""
    write_model(tmp_path, "jina-bert-v2", vocab_size=VOCAB)
    t = load_file(tmp_path / "model.safetensors")
    slopes = 2.0 ** (-2 * torch.arange(1, 5))
    for tokens, found in zip(PROMPTS, vectors(tmp_path), strict=True):
        at = torch.arange(len(tokens))
        far = (at[:, None] - at).abs() * slopes[:, None, None]

        def apply(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(x, (64,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-12)

        x = t["embeddings.word_embeddings.weight"][tokens] + t["embeddings.token_type_embeddings.weight"][0]
        x = normed(x, "embeddings.LayerNorm")
        for i in range(4):
            own = f"encoder.layer.{i}."
            heads = [apply(x, f"{own}attention.self.{name}").view(-1, 4, 16).transpose(0, 1)
                     for name in ("query", "key", "value")]  # fmt: skip
            scores = (heads[0] @ heads[1].transpose(1, 2) / 4 - far).softmax(-1)
            mixed = apply((scores @ heads[2]).transpose(0, 1).reshape(-1, 64), f"{own}attention.output.dense")
            x = normed(x + mixed, f"{own}attention.output.LayerNorm")
            gate, up = apply(x, f"{own}mlp.gated_layers").chunk(2, -1)
            x = normed(x + apply(F.gelu(gate) * up, f"{own}mlp.wo"), f"{own}mlp.layernorm")
        want = x.mean(0)
        np.testing.assert_allclose(found, (want / want.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("name", MADE)
def test_company_and_steps_change_no_bit(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, vocab_size=VOCAB)
    alone = vectors(tmp_path, max_num_seqs=1)
    for options in ({}, {"max_num_batched_tokens": 140}, {"block_size": 1}):
        np.testing.assert_array_equal(vectors(tmp_path, **options), alone)


@pytest.mark.parametrize("name", MADE)
def test_weights_of_few_bits(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, vocab_size=VOCAB)
    exact = vectors(tmp_path)
    for quantization, least in (("int8", 0.999), ("int4", 0.95)):
        assert ((vectors(tmp_path, quantization=quantization, group_size=32) * exact).sum(1) > least).all()


def test_pairs_with_two_marks_between_them(tmp_path: Path) -> None:
    """As RoBERTa's tokenizers join them."""
    folder, tokenizer = tmp_path / "model", byte_level("gpt-2")
    write_model(folder, "roberta", "ForSequenceClassification", vocab_size=VOCAB, num_labels=1)
    tokenizer.add_special_tokens(["</s>"])
    ends = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
    tokenizer.post_processor = processors.RobertaProcessing(ends[1], ends[0], add_prefix_space=False)
    add_tokenizer(folder, tokenizer)
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    own, read = (Tokenizer.from_folder(path) for path in (folder, tmp_path / "model.gguf"))
    for text in TEXTS:
        assert read.encode_pair(QUERY, text) == own.encode_pair(QUERY, text)
    assert read.encode_pair("a", "b")[0].count(ends[1][1]) == 3
