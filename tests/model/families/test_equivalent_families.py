"""Families that transformers has no code for, and what it computes otherwise: against an equal model of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from family_tensors import RELATIVES, grouped_qkv, packed_qkv, rewrite, write_relative
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, assert_left_out, load, prompt
from quire.core.config import flat_config
from quire.core.errors import ModelError
from quire.model.build import load_model
from quire.model.describe import describe
from quire.ops.backend import Ops


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


def assert_equal(folder: Path, ops: Ops, want: Callable[[list[int]], Tensor]) -> None:
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    model = load_model(flat_config(model=str(folder)), ops)
    for name, cut in CUTS.items():
        for got, tokens in zip(Paged(model, sequences).run(cut), sequences, strict=True):
            assert relative_error(got, want(tokens)) <= TOLERANCE, name


@pytest.mark.parametrize("bias", [False, True])
def test_internlm2(ops: Ops, tmp_path: Path, bias: bool) -> None:
    oracle = write(tmp_path, "llama", attention_bias=bias)
    rewrite(tmp_path, grouped_qkv)
    edit_config(tmp_path, model_type="internlm2", bias=bias, remove=("attention_bias",))
    assert_equal(tmp_path, ops, lambda tokens: logits(oracle, tokens))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", RELATIVES)
def test_families_that_are_another_model_in_other_words(family: str, ops: Ops, tmp_path: Path) -> None:
    oracle = write_relative(tmp_path, family)
    assert_equal(tmp_path, ops, lambda tokens: logits(oracle, tokens))


@pytest.mark.parametrize("second", [False, True])
def test_baichuan_7b(ops: Ops, tmp_path: Path, second: bool) -> None:
    oracle = write(tmp_path, "llama", num_key_value_heads=4)
    rewrite(tmp_path, packed_qkv)
    edit_config(tmp_path, model_type="baichuan", **({"z_loss_weight": 0} if second else {}))
    if second:
        with torch.no_grad():
            oracle.lm_head.weight.copy_(F.normalize(oracle.lm_head.weight))
    assert_equal(tmp_path, ops, lambda tokens: logits(oracle, tokens))


def test_baichuan_13b_has_alibi_and_no_rope(ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", num_key_value_heads=4)
    rewrite(tmp_path, packed_qkv)
    edit_config(tmp_path, model_type="baichuan", model_max_length=128,
                remove=("max_position_embeddings", "rope_parameters"))  # fmt: skip
    oracle.model.rotary_emb.forward = lambda x, position_ids: (torch.ones(1, x.shape[1], 16), torch.zeros(1))
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])

    def want(tokens: list[int]) -> Tensor:
        distance = torch.arange(len(tokens))[None] - torch.arange(len(tokens))[:, None]
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
        with torch.no_grad():
            return oracle(torch.tensor(tokens)[None], attention_mask=bias[None], use_cache=False).logits[0]

    assert_equal(tmp_path, ops, want)


def share(layers: int, last: int) -> str:
    """An attention of transformers in which layers from `last` on read the keys and values of layer `last` - 1."""
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        held[module.layer_idx] = key, value
        key, value = held[min(module.layer_idx, last - 1)]
        return eager_attention_forward(module, query, key, value, *args, **named)

    name = f"shared_{layers}_{last}"
    AttentionInterface.register(name, attention)
    return name


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_that_share_keys_and_values(family: str, kept: bool, ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, family, num_hidden_layers=4, head_dim=16)
    edit_config(tmp_path, num_kv_shared_layers=2)
    if not kept:
        unread = tuple(f"layers.{i}.self_attn.{p}" for i in (2, 3) for p in ("k_proj", "v_proj", "k_norm"))
        rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if not any(u in n for u in unread)})
    facts = describe(str(tmp_path))
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2, "two layers of four keep two heads of 16 numbers, in bf16"
    mask = torch.full((128, 128), -torch.inf).triu(1)
    oracle.config._attn_implementation = share(4, 2)

    def want(tokens: list[int]) -> Tensor:
        seen = mask[: len(tokens), : len(tokens)][None, None]
        with torch.no_grad():
            return oracle(torch.tensor(tokens)[None], attention_mask=seen, use_cache=False).logits[0]

    assert_equal(tmp_path, ops, want)
    assert_left_out(Paged(load(tmp_path, ops), [prompt(9, 1)]), want(prompt(9, 1)), exact=False)


@pytest.mark.parametrize(("length", "max_model_len"), [(32, 32), (60, 60), (19, 32)])
def test_dynamic_rope_is_that_of_the_longest_sequence_served(length: int, max_model_len: int, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    oracle = write(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=32)
    model = load_model(flat_config(model=str(tmp_path), max_model_len=max_model_len), backend("reference"))
    tokens = prompt(length, 1)
    whole = Paged(model, [tokens]).run([[length]])[0]
    assert relative_error(whole, logits(oracle, tokens)) <= TOLERANCE
    cut = Paged(model, [tokens]).run([[7], *([[1]] * (length - 7))])[0]
    assert relative_error(cut, whole) <= TOLERANCE


def test_stacked_pieces_must_be_whole(tmp_path: Path) -> None:
    write(tmp_path, "stablelm", qk_layernorm=True)
    rewrite(tmp_path, lambda t: {n: w for n, w in t.items() if "layers.1.self_attn.q_layernorm.norms.3" not in n})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_layernorm\.weight is \[3, 16\]"):
        describe(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["qk_layernorm"]
