"""Smaller checkpoints load in transformers and here, and give the logits of what was left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_variants import LATENTS, MIXTURES
from oracle import backend, logits, relative_error, save, write
from paged_model import Paged, prompt
from pruned_checkpoints import (
    ATTENTION_OUT,
    HYBRIDS,
    INPUT_OUT,
    MLP_OUT,
    UNEVEN_MLPS,
    UNLIKE,
    WITHOUT_MLP,
    checkpoint,
    layers_of,
    part,
    read,
)
from pruned_checkpoints import PRUNED as VARIANTS
from quire.compress.prune.structured import SmallerCheckpoint, drop_channels, drop_heads, drop_layers
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.build import load_model
from quire.model.families.find import read_spec

TOLERANCE = 1e-5
QUICK = ("llama_biases", "qwen3", "gpt2", "gpt_neox", "phi3", "gemma2", "gemma3")


def silence(matrix: nn.Module, inputs: Sequence[int] | None = None) -> None:
    """Have a matrix read nothing of `inputs`, or, without any, say nothing."""
    weight = matrix.weight
    assert isinstance(weight, Tensor)
    turned = type(matrix).__name__ == "Conv1D"
    with torch.no_grad():
        if inputs is None:
            weight.zero_()
            if isinstance(matrix.bias, Tensor):
                matrix.bias.zero_()
        else:
            (weight if turned else weight.T)[list(inputs)] = 0


def same(oracle: PreTrainedModel, made: SmallerCheckpoint, folder: Path) -> None:
    """The smaller checkpoint gives, in transformers and here, the logits of the whole `oracle`."""
    folder.mkdir()
    save_file(made[0], folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made[1]))
    tokens = prompt(19, 1)
    want = logits(oracle, tokens)
    attention = oracle.config._attn_implementation
    small, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert relative_error(logits(small.eval(), tokens), want) <= TOLERANCE
    model = load_model(flat_config(model=str(folder)), backend("reference"))
    (got,) = Paged(model, [tokens]).run([[19]])
    assert relative_error(got, want) <= TOLERANCE


def silence_layer(layer: nn.Module) -> None:
    """Have attention and MLP add nothing, experts included, and leave the stream as it is."""
    for name, matrix in layer.named_modules():
        if name in (*ATTENTION_OUT, *MLP_OUT, *INPUT_OUT):
            silence(matrix)
    with torch.no_grad():
        if isinstance(factor := getattr(layer, "layer_scalar", None), Tensor):
            factor.fill_(1.0)
        for name, p in layer.named_parameters():
            if "down_proj" in name or name.endswith("experts.mlp.w2"):
                p.zero_()


def rewrite(oracle: PreTrainedModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    save(oracle, folder)
    return read(folder)


def check_layers(variant: str, folder: Path) -> None:
    oracle = checkpoint(folder / "whole", variant, **({"num_layers": 4} if variant == "gpt_neo" else {}))
    layers = layers_of(oracle)
    gone = [0] if variant == "ernie4_5_moe_biases" else [1] if len(layers) == 3 else [0, 3]
    if variant == "modernbert_decoder":
        gone = [3]  # the first layer alone has no norm before its attention
    if getattr(oracle.config, "num_kv_shared_layers", 0):
        gone = [len(layers) - 2]  # what the others read stays
    elif variant.startswith("gemma4") and len(layers) == 4:
        gone = [0, 1]  # transformers makes the last layer one that sees everything
    for i in gone:
        silence_layer(layers[i])
    made = drop_layers(*rewrite(oracle, folder / "whole"), [i for i in range(len(layers)) if i not in gone])
    same(oracle, made, folder / "small")


def check_channels(variant: str, folder: Path) -> None:
    oracle = checkpoint(folder / "whole", variant)
    keep = []
    for number, layer in enumerate(layers_of(oracle)):
        down = part(layer, MLP_OUT)
        assert isinstance(down.weight, Tensor)
        width = max(down.weight.shape)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(number)).tolist()
        silence(down, order[40:])
        keep.append(sorted(order[:40]))
    same(oracle, drop_channels(*rewrite(oracle, folder / "whole"), keep), folder / "small")


def check_heads(variant: str, folder: Path, kept: Sequence[Sequence[int]], **facts: Any) -> None:
    oracle = checkpoint(folder / "whole", variant, **facts)
    layers, keep = layers_of(oracle), []
    for number, layer in enumerate(layers):
        out, heads = part(layer, ATTENTION_OUT), oracle.config.num_attention_heads
        assert isinstance(out.weight, Tensor)
        size, own = out.weight.shape[1] // heads, kept[number % len(kept)]
        silence(out, [h * size + i for h in range(heads) if h not in own for i in range(size)])
        keep.append(own)
    same(oracle, drop_heads(*rewrite(oracle, folder / "whole"), keep), folder / "small")


GROUPS, OF_EACH = [[0, 1], [2, 3], [0, 1]], [[0, 2], [1, 3], [1, 2]]


@pytest.mark.parametrize("variant", [*QUICK, "mixtral", "gpt_oss", "qwen2_moe_some_dense", "deepseek_v3"])
def test_a_model_without_layers_that_add_nothing_is_the_same(variant: str, tmp_path: Path) -> None:
    check_layers(variant, tmp_path)


@pytest.mark.parametrize("variant", QUICK)
def test_a_model_without_channels_that_nothing_reads_is_the_same(variant: str, tmp_path: Path) -> None:
    check_channels(variant, tmp_path)


@pytest.mark.parametrize("variant", ["llama_biases", "qwen3", "phi3", "gemma2", "gemma3", "cohere_qk_norm", "gpt_oss"])
@pytest.mark.parametrize("kept", [GROUPS, OF_EACH], ids=["groups", "of_each_group"])
def test_a_model_without_heads_that_nothing_reads_is_the_same(
    variant: str, kept: list[list[int]], tmp_path: Path
) -> None:
    check_heads(variant, tmp_path, kept)


THREE = [[0, 1, 3], [0, 2, 3], [1, 2, 3]]
EVEN = ("llama", "gemma2", "gemma3_text", "internlm3", "vaultgemma", "arcee", "cwm", "hyperclovax", "iquestcoder",
        "jais2", "muse_glimmer_text")  # fmt: skip
"""Families that transformers makes no model of whose hidden size is no multiple of its heads."""


def check_three_of_four(variant: str, folder: Path) -> None:
    """What is left is a model of the family, or it is said which numbers of heads are."""
    if VARIANTS[variant][0] not in EVEN:
        check_heads(variant, folder, THREE, num_key_value_heads=4)
        return
    oracle = checkpoint(folder, variant, num_key_value_heads=4)
    keep = [THREE[i % 3] for i in range(len(layers_of(oracle)))]
    with pytest.raises(ConfigError, match=r"of which 3 would be left; leave 2 \(heads = 0.5\), 1 \(heads = 0.75\)"):
        drop_heads(*read(folder), keep)


@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen3", "phi3", "mixtral"])
def test_a_number_of_heads_that_does_not_divide_the_hidden_size(variant: str, tmp_path: Path) -> None:
    check_three_of_four(variant, tmp_path)


POST_LN = ("openai_gpt", "opt_350m", "opt_post_norm")
"""Their layers norm what they add to, so none is the identity."""
FIXED_WIDTH = ("bloom", "gpt_neox_japanese", "mpt", "openai-gpt", "hrm_text")
SPAN_CHANNELS = ("bitnet",)
SPAN_HEADS = ("bitnet", "flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe")
FIXED_HEADS = ("gpt2", "gpt_bigcode", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mpt", "stablelm",
               "helium", "phimoe", "axk1", "biogpt", "codegen", "ctrl", "dbrx", "gpt_neox_japanese",
               "modernbert-decoder", "openai-gpt", "persimmon", "xglm", "hrm_text",
               *SPAN_HEADS, *HYBRIDS, *UNLIKE)  # fmt: skip


UNCUT = (
    "jamba",
    "jamba_dense",
    "minimax",
    "minimax_factors",
    *(
        v
        for v in (*VARIANTS, *LATENTS)
        if v.startswith(("falcon_h1", "gemma3n", "hrm", "longcat", "minicpm", "zamba2"))
    ),
)
"""Their config.json says by the number of a layer what it is, or a layer of it is two here, or what layers add is
scaled, or how long they remember, by how many there are, or layers mix several streams."""


@pytest.mark.parametrize("variant", UNCUT)
def test_layers_whose_kinds_no_config_says(variant: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, variant)
    tensors, config = read(tmp_path)
    with pytest.raises((ModelError, ConfigError)):
        drop_layers(tensors, config, list(range(1, read_spec(config, "config.json")[0].layers)))


@pytest.mark.parametrize("variant", ["step3p5", "deepseek_v32", "axk2_kinds", "dots3_note", "dots3_note_kinds"])
def test_limits_and_indexers_of_layers_go_with_them(variant: str, tmp_path: Path) -> None:
    check_layers(variant, tmp_path)


def test_a_layer_stays_with_the_one_whose_indexer_it_shares(tmp_path: Path) -> None:
    checkpoint(tmp_path, "glm_moe_dsa_shared")
    with pytest.raises(ModelError, match="layer 1 reads tokens that the indexer of layer 0 chose; keep both"):
        drop_layers(*read(tmp_path), [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in (*VARIANTS, *LATENTS) if v not in (*POST_LN, *UNCUT)])
def test_layers_of_every_family(variant: str, tmp_path: Path) -> None:
    check_layers(variant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_channels_of_every_family(variant: str, tmp_path: Path) -> None:
    if variant in (*MIXTURES, *UNEVEN_MLPS) or VARIANTS[variant][0] in (*FIXED_WIDTH, *SPAN_CHANNELS, *WITHOUT_MLP):
        checkpoint(tmp_path, variant)
        reasons = (
            r"experts|no other intermediate_size|have no MLP|differ in their width|which gates pass|spans all|"
            r"run several"
        )
        with pytest.raises(ModelError, match=reasons):
            drop_channels(*read(tmp_path), [[0]] * 3)
    else:
        check_channels(variant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_every_family(variant: str, tmp_path: Path) -> None:
    if VARIANTS[variant][0] in FIXED_HEADS or variant == "phi3_longrope":
        oracle = checkpoint(tmp_path, variant)
        reasons = (
            r"no other (head_dim|short_factor)|spans all heads|rope would change|of some layers only|"
            r"may differ in how|read another's|run several"
        )
        with pytest.raises(ModelError, match=reasons):
            drop_heads(*read(tmp_path), [[0, 2]] * len(layers_of(oracle)))
    else:
        check_heads(variant, tmp_path, OF_EACH)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if VARIANTS[v][0] not in FIXED_HEADS and v != "phi3_longrope"])
def test_three_of_four_heads_of_every_family(variant: str, tmp_path: Path) -> None:
    check_three_of_four(variant, tmp_path)


def test_heads_over_latents_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "deepseek_v3")
    with pytest.raises(ModelError, match="over latents"):
        drop_heads(*read(tmp_path), OF_EACH)


def test_what_is_not_touched_is_not_copied(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    tensors, config = read(tmp_path)
    before = {name: t.clone() for name, t in tensors.items()}
    made, smaller = drop_heads(tensors, config, GROUPS)
    assert {n for n in made if made[n] is not tensors[n]} == {n for n in made if "self_attn" in n}
    assert all(torch.equal(tensors[n], before[n]) for n in tensors) and config["num_attention_heads"] == 4
    assert smaller["num_attention_heads"] == 2 and smaller["num_key_value_heads"] == 1 and smaller["head_dim"] == 16


def test_a_size_that_was_left_to_its_default_is_written(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gpt2")
    tensors, config = read(tmp_path)
    assert config["n_inner"] is None
    assert drop_channels(tensors, config, [range(7)] * 3)[1]["n_inner"] == 7


@pytest.mark.parametrize(
    ("drop", "keep", "reason"),
    [
        (drop_layers, [], "layers to keep"),
        (drop_layers, [1, 0], "ascending"),
        (drop_layers, [0, 3], "from 0 to 2"),
        (drop_channels, [[0], [0]], "given for 2 layers, the model has 3"),
        (drop_channels, [[0], [0, 1], [0]], r"\[1, 2\] in different layers"),
        (drop_channels, [[0], [96], [0]], "channels of layer 1 to keep"),
        (drop_heads, [[0, 1, 2]] * 3, r"with \[1, 2\] query heads"),
        (drop_heads, [[0, 1], [0, 2], [0, 1]], "how many key/value heads"),
    ],
)
def test_parts_that_do_not_fit_are_refused(drop: Any, keep: Any, reason: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=reason):
        drop(*read(tmp_path), keep)


def test_what_no_config_says_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "ernie4_5_moe_biases")
    with pytest.raises(ModelError, match=r"no config.json of the family says what is left: moe would change; prune"):
        drop_layers(*read(tmp_path), [0, 2])


def test_models_that_cannot_lose_parts_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t5", "t5", d_kv=16, d_ff=96)
    with pytest.raises(ModelError, match="encoder-decoder"):
        drop_layers(*read(tmp_path / "t5"), [0])
    checkpoint(tmp_path / "llama", "llama")
    tensors, config = read(tmp_path / "llama")
    with pytest.raises(ModelError, match="prune before quantizing"):
        drop_layers(tensors, config | {"quantization_config": {"quant_method": "gptq"}}, [0])
    with pytest.raises(ModelError, match="missing tensors"):
        drop_layers({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, config, [0])
