"""Model folders written as GGUF: the same tokens and logits as the folder with the same rounded weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import foreign_weights as foreign
from gguf_writing import SHAPE, add_tokenizer, byte_level, pieces, small, words
from often import one_of
from oracle import logits, relative_error, write
from paged_model import Paged, prompt
from quantized_checkpoints import load
from quire.compress.layouts.base import Layout
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.layouts.gguf import write_gguf
from quire.compress.layouts.gptq import GptqLayout
from quire.core.errors import ConfigError, ModelError
from quire.gguf.file import GgufFile
from quire.model.describe import describe
from quire.ops.weights import Weight
from quire.quant.rtn import INT4, INT8
from quire.text.gguf_tokenizer import PRE
from quire.text.tokenizer import Tokenizer as Ours
from torch_weights import quantize_torch

WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
DELTA = {"head_dim": 16, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "head_dim": 24}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": ROPE}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral whole": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 0.7}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3moe": ("qwen3_moe", NARROW | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3next": ("qwen3_next", NARROW | DELTA | {"shared_expert_intermediate_size": 64}),
    "qwen35": ("qwen3_5_text", DELTA | {"linear_num_value_heads": 6, "linear_value_head_dim": 24}),
    "qwen35moe": ("qwen3_5_moe_text", NARROW | DELTA | {"shared_expert_intermediate_size": 64}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}),
    "lfm2moe": ("lfm2_moe", NARROW | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}),
}


def whole(folder: Path, tokens: list[int], **options: Any) -> torch.Tensor:
    return Paged(load(folder, dtype="float32", **options), [tokens]).run([[len(tokens)]])[0]


@pytest.mark.parametrize("name", one_of(3, FAMILIES))
def test_families_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[name]
    model = write(tmp_path, kind, **SHAPE | facts)
    add_tokenizer(tmp_path, byte_level())
    path, tokens = tmp_path / "model.gguf", prompt(19, 1)
    write_gguf(tmp_path, path, "F32")
    assert relative_error(whole(path, tokens), logits(model, tokens)) <= 1e-5
    ours, theirs = describe(str(path)), describe(str(tmp_path))
    assert ours.parameters == theirs.parameters and ours.spec.windows == theirs.spec.windows


FORMATS = {
    "llama": ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q3_K"),
    "qwen3": ("BF16", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q2_K"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("family", "kind"), one_of(2, [(family, kind) for family, kinds in FORMATS.items() for kind in kinds])
)
def test_formats_answer_as_the_rounded_weights_do(family: str, kind: str, tmp_path: Path) -> None:
    """transformers' model gets the numbers that the gguf package reads of the file."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is in the dev extra")
    from gguf_models import put_back

    model = write(tmp_path, family, **WIDE)
    add_tokenizer(tmp_path, byte_level())
    path, tokens = tmp_path / "model.gguf", prompt(19, 1)
    write_gguf(tmp_path, path, kind)
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    plain = kind in ("F16", "BF16")
    assert found["blk.0.attn_q.weight"] == kind and found["output_norm.weight"] == "F32"
    assert found["output.weight"] == (kind if plain or kind == "Q8_0" else "Q6_K")
    before = {n: p.clone() for n, p in model.state_dict().items()}
    put_back(model, path)
    change = relative_error(model.state_dict()["model.layers.0.mlp.up_proj.weight"],
                            before["model.layers.0.mlp.up_proj.weight"])  # fmt: skip
    assert 0 < change < 0.4
    got = whole(path, tokens, **({} if plain else {"activations": "int16"}))
    assert relative_error(got, logits(model, tokens)) <= 1e-3


@pytest.mark.parametrize("pre", ["gpt-2", "llama3", "qwen2", "starcoder", "gpt-4o", "tekken", "deepseek-v3", "default"])
def test_byte_level_vocabularies(pre: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", **SHAPE)
    tokenizer = byte_level(pre)
    if pre in ("llama3", "tekken"):
        definition = json.loads(tokenizer.to_str())
        definition["model"]["ignore_merges"] = True
        tokenizer = Tokenizer.from_str(json.dumps(definition))
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    add_tokenizer(tmp_path, tokenizer)
    write_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    same_tokens(tmp_path, tmp_path / "model.gguf")
    metadata = GgufFile(tmp_path / "model.gguf").metadata
    assert PRE[metadata["tokenizer.ggml.pre"]] == PRE[pre] and metadata["tokenizer.ggml.model"] == "gpt2"


def test_pieces_with_scores(tmp_path: Path) -> None:
    write(tmp_path, "llama", **SHAPE)
    add_tokenizer(tmp_path, pieces())
    write_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    same_tokens(tmp_path, tmp_path / "model.gguf")
    assert GgufFile(tmp_path / "model.gguf").metadata["tokenizer.ggml.model"] == "llama"


def same_tokens(folder: Path, path: Path) -> None:
    theirs, ours = Ours.from_folder(folder), Ours.from_folder(path)
    for text in [*words(), "the fox<think>over</s> <s>the<|im_end|>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids), text
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id) == (1, 2)
    assert GgufFile(path).metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"


def test_weights_keep_their_codes(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3", **WIDE)
    add_tokenizer(tmp_path, byte_level())
    base, other = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
    w = model.state_dict()[f"{base}.weight"]
    for kind, quantizer, group in (("Q4_0", INT4, 32), ("Q8_0", INT8, 64)):
        weight = quantize_torch(quantizer, w, group).weight
        loose = quantize_torch(INT8, model.state_dict()[f"{other}.weight"], 128).weight
        order = torch.randperm(512).int()
        given = {base: weight, other: replace(loose, order=order)}
        write_gguf(tmp_path, tmp_path / "model.gguf", kind, given)
        import gguf

        read = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors
        }
        assert np.array_equal(read["blk.0.ffn_up.weight"], weight.dequantize().numpy())
        want = given[other].dequantize().numpy()
        error = np.abs(read["blk.1.ffn_down.weight"] - want).max() / np.abs(want).max()
        assert 0 < error < (0.13 if kind == "Q4_0" else 0.01)
    with pytest.raises(ConfigError, match="has no matrix nothing"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0", {"nothing": Weight("f32", w)})


@pytest.mark.parametrize("layout", [GptqLayout(), CompressedTensorsLayout(sparsity="sparse-bitmask")])
def test_folders_in_other_layouts(layout: Layout, tmp_path: Path) -> None:
    """A folder that is quantized or sparse already is written with the numbers that it stands for."""

    def convert(w: torch.Tensor) -> tuple[foreign.Parts, torch.Tensor]:
        plain = Weight("f32", w * (w > 0))
        weight = quantize_torch(INT4, w, 64).weight if isinstance(layout, GptqLayout) else plain
        return {n.removeprefix("x."): t for n, t in layout.tensors("x", weight).items()}, weight.dequantize()

    example = {"x": quantize_torch(INT4, torch.randn(64, 128), 64).weight if isinstance(layout, GptqLayout) else
               Weight("f32", torch.eye(64))}  # fmt: skip
    model = foreign.replace_linears(tmp_path, layout.config(example), convert)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    add_tokenizer(tmp_path, small())
    write_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    tokens = prompt(9, 1)
    assert relative_error(whole(tmp_path / "model.gguf", tokens), logits(model, tokens)) <= 1e-5


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    write(tmp_path, "llama", **SHAPE | {"hidden_size": 96, "head_dim": 24, "intermediate_size": 104})
    add_tokenizer(tmp_path, byte_level())
    write_gguf(tmp_path, tmp_path / "model.gguf", "Q4_K")
    kinds = {name: t.type.name for name, t in GgufFile(tmp_path / "model.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q5_0" and kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert whole(tmp_path / "model.gguf", prompt(9, 1)).isfinite().all()


def test_matrices_with_formats_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "llama", **WIDE)
    add_tokenizer(tmp_path, byte_level())
    own = {"model.layers.1.mlp.up_proj": "Q8_0", "lm_head": "Q4_K", "model.embed_tokens": "F16"}
    write_gguf(tmp_path, tmp_path / "model.gguf", "Q4_0", kinds=own)
    kinds = {name: t.type.name for name, t in GgufFile(tmp_path / "model.gguf").tensors.items()}
    assert kinds["blk.1.ffn_up.weight"] == "Q8_0" and kinds["blk.0.ffn_up.weight"] == "Q4_0"
    assert kinds["output.weight"] == "Q4_K" and kinds["token_embd.weight"] == "F16"
    assert whole(tmp_path / "model.gguf", prompt(9, 1)).isfinite().all()
    for wrong, message in (({"lm_head": "Q9"}, "'Q9' is not known"), ({"nothing": "F16"}, "has no matrix nothing")):
        with pytest.raises(ConfigError, match=message):
            write_gguf(tmp_path, tmp_path / "model.gguf", "Q4_0", kinds=wrong)


def word_level(folder: Path) -> None:
    add_tokenizer(folder, Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>")))


def own_words(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    add_tokenizer(folder, tokenizer)


REFUSED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "family": (
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 64},
        None,
        "a model of 'opt' cannot be written as GGUF; can be: afmoe, apertus",
    ),
    "fact": ("llama", {"hidden_act": "gelu"}, None, "GGUF has no key for the model's activation"),
    "rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, None, "rope"),
    "no tokenizer": ("llama", {}, lambda folder: None, "tokenizer.json is missing"),
    "words alone": ("llama", {}, word_level, "is of type WordLevel, only BPE, Unigram and WordPiece"),
    "words": ("llama", {}, own_words, "cuts text in a way of its own"),
    "rows": ("llama", {"vocab_size": 99}, None, "the model has 99 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gguf_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    kind, facts, tokenizer, message = REFUSED[name]
    write(tmp_path, kind, **SHAPE | facts)
    (tokenizer or (lambda folder: add_tokenizer(folder, byte_level())))(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        write_gguf(tmp_path, tmp_path / "model.gguf", "F16")
    assert "\n" not in str(error.value) and not [*tmp_path.glob("*gguf*")]


def test_an_unknown_format_and_nan_leave_nothing(tmp_path: Path) -> None:
    model = write(tmp_path, "llama", **SHAPE)
    add_tokenizer(tmp_path, byte_level())
    with pytest.raises(ConfigError, match="'Q9' is not known; known: F32, F16"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "Q9")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight: .* nan or inf"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    assert not [*tmp_path.glob("*gguf*")]


def test_a_model_is_written_in_several_files(tmp_path: Path) -> None:
    """Each of no more than so many bytes but for a tensor that is larger; together they are the model in one file."""
    write(tmp_path / "model", "llama", **WIDE)
    add_tokenizer(tmp_path / "model", byte_level())
    write_gguf(tmp_path / "model", tmp_path / "whole.gguf", "Q8_0")
    write_gguf(tmp_path / "model", tmp_path / "parts.gguf", "Q8_0", most=300_000)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 3 and parts[0].name == f"parts-00001-of-{len(parts):05}.gguf"
    assert not (tmp_path / "parts.gguf").exists()
    whole, tokens = load(tmp_path / "whole.gguf"), prompt(19, 1)
    (want,) = Paged(whole, [tokens]).run([[19]])
    (got,) = Paged(load(parts[0]), [tokens]).run([[19]])
    assert torch.equal(got, want)
    assert describe(str(parts[0])).parameters == describe(str(tmp_path / "whole.gguf")).parameters
    sizes = [[tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors] for path in parts]
    assert all(sum(own) <= 300_000 or len(own) == 1 for own in sizes)
    facts = gguf.GGUFReader(parts[1]).fields
    assert facts["split.no"].contents() == 1 and facts["split.count"].contents() == len(parts)
    assert facts["split.tensors.count"].contents() == sum(map(len, sizes))
