"""Tiny models of every family through the paged cache: variants, ways to cut prompts, and tolerances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_variants import GATED_DENSE
from dense_variants import DENSE
from gemma_variants import GEMMAS
from mixture_variants import HYBRIDS
from oracle import BACKENDS, backend, relative_error
from quire.core.config import flat_config
from quire.model.batch import Batch
from quire.model.build import Model, load_model
from quire.model.net.decoder import Decoder
from quire.ops.arrays import to_torch
from quire.ops.backend import Ops
from quire.ops.layout import with_states
from quire.ops.recurrent import StateBatch

TOLERANCE = 1e-5
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}  # fmt: skip
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.7,
         "final_logit_softcapping": 2.0}  # fmt: skip
DELTA = {"head_dim": 16, "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention",
         "full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 16}  # fmt: skip
SCANS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 16, "head_dim": 16}
FALCON = SCANS | {"mamba_d_ssm": 128}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2}


ZAMBA2 = {"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "adapter_rank": 32, "num_key_value_heads": 4,
          "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}  # fmt: skip


def nemotron(pattern: str, **facts: Any) -> tuple[str, dict[str, Any]]:
    """A Nemotron-H whose layers are the letters of `pattern`."""
    return "nemotron_h", NEMOTRON | facts | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 24}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama_yarn_rope": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": YARN | MSCALE}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "phi3": ("phi3", {"rope_parameters": HALF_ROPE}),
    "phi3_window": ("phi3", {"sliding_window": 5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "smollm3_interval": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo": ("olmo", {}),
    "olmo_clipped": ("olmo", {"clip_qkv": 0.4}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                            "attention_multiplier": 0.3}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"attn_logit_softcapping": None}),
    "gemma3_full_first": ("gemma3_text", GEMMA | {"attn_logit_softcapping": None, "num_hidden_layers": 4,
                                                  "layer_types": ["full_attention", "sliding_attention"] * 2}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "stablelm": ("stablelm", {"use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere": ("cohere", {}),
    "cohere_qk_norm": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode_mha": ("gpt_bigcode", {"multi_query": False}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt_plain": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False,
                          "layer_norm_elementwise_affine": False}),
    "bloom": ("bloom", {}),
    "bloom_six_heads": ("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "falcon": ("falcon", {}),
    "falcon_new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_new_one_norm": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2,
                                       "num_ln_in_parallel_attn": 1}),
    "falcon_sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_alibi": ("falcon", {"alibi": True}),
    "mpt": ("mpt", {}),
    "mpt_six_heads": ("mpt", {"d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 0.4}}),
    "glm4": ("glm4", {"head_dim": 16}),
    "ministral": ("ministral", {"sliding_window": 5, "head_dim": 16}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True, "head_dim": 24}),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5_biases": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("helium", {"head_dim": 16}),
    "glm": ("glm", {"head_dim": 16}),
    "olmo3": ("olmo3", {"sliding_window": 5, "num_hidden_layers": 4}),
    "exaone4": ("exaone4", {"sliding_window": 5, "num_hidden_layers": 4}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "cohere2": ("cohere2", {"sliding_window": 5, "num_hidden_layers": 4}),
    "vaultgemma": ("vaultgemma", GEMMA),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": ("nemotron", {"rope_parameters": HALF_ROPE}),
    "gpt_neo": ("gpt_neo", {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5}),
    "stablelm_qk_norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "opt_350m": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt_post_norm": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    "opt_narrow": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}}),
    "phi4_mini": ("phi3", {"num_key_value_heads": 1, "tie_word_embeddings": True,
                           "rope_parameters": HALF_ROPE | {"partial_rotary_factor": 0.75}}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 64}),
    "lfm2_biases": ("lfm2", {"full_attn_idxs": [0, 2], "num_hidden_layers": 4, "conv_bias": True, "conv_L_cache": 4,
                             "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_wide_values": ("qwen3_5_text", DELTA | {"linear_num_value_heads": 2, "linear_value_head_dim": 24,
                                                     "attention_bias": True, "tie_word_embeddings": True}),
    "granite4_dense": ("granitemoehybrid", SCANS | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
        "shared_intermediate_size": 80, "position_embedding_type": "rope", "mamba_n_groups": 1,
        "mamba_proj_bias": True, "attention_bias": True, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
        "tie_word_embeddings": True}),
    "bamba": ("bamba", SCANS | {"attn_layer_indices": [1], "time_step_limit": [0.3, 0.9]}),
    "bamba_biases": ("bamba", SCANS | {"attn_layer_indices": [0], "mamba_conv_bias": False, "mamba_proj_bias": True,
                                       "mlp_bias": True, "mamba_d_conv": 3}),
    "nemotron_h": nemotron("M-M*-"),
    "nemotron_h_biases": nemotron("-*MM", use_bias=True, mlp_bias=True, use_conv_bias=False),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2_one_group": ("mamba2", MAMBA2 | {"num_heads": 4, "head_dim": 32, "state_size": 24, "n_groups": 1,
                                             "use_bias": True, "use_conv_bias": False, "conv_kernel": 3,
                                             "time_step_limit": [0.2, 1.0], "tie_word_embeddings": True}),
    "mamba": ("mamba", {"state_size": 8, "time_step_rank": 6}),
    "mamba_biases": ("mamba", {"state_size": 12, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3,
                               "time_step_rank": 5, "tie_word_embeddings": False}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 16, "time_step_rank": 4}),
    "jamba_dense": ("jamba", JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 7,
                                      "tie_word_embeddings": True}),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1_multipliers": ("falcon_h1", FALCON | {
        "embedding_multiplier": 3.5, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.8, 0.3], "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36], "ssm_out_multiplier": 0.47, "num_hidden_layers": 2}),
    "falcon_h1_biases": ("falcon_h1", FALCON | {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "attention_bias": True,
        "mlp_bias": True, "projectors_bias": True, "tie_word_embeddings": True}),
    "falcon_h1_normed": ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 4, "head_dim": 24}),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2_turns": ("zamba2", ZAMBA2 | {
        "num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 1,
        "num_hidden_layers": 6, "layers_block_type": ["hybrid", "mamba", "hybrid", "mamba", "hybrid", "hybrid"],
        "time_step_min": 0.3}),
    "qwen3_biases_tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    **GATED_DENSE,
    **DENSE,
    **HYBRIDS,
    **GEMMAS,
}  # fmt: skip


class Paged:
    """A paged cache with shuffled blocks, and sequences that advance in it by any number of tokens."""

    def __init__(self, model: Model, sequences: list[list[int]], seed: int = 0) -> None:
        self.model, self.sequences = model, sequences
        size = self.size = next(layout for parts in model.layouts for layout in parts).block_size
        needed = [-(-len(s) // size) for s in sequences]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed))[: sum(needed)]
        self.blocks = list(order.split(needed))
        own = [
            tuple(model.decoder.ops.allocate_cache(layout, sum(needed) + 2) for layout in parts)
            for parts in model.layouts
        ]
        self.caches = [own[model.spec.kv_layer(i)] for i in range(model.spec.layers)]
        for i, layout in zip(model.own, model.own_states, strict=True):
            if layout is not None:
                self.caches[i] = with_states(self.caches[i], model.decoder.ops.zeros(layout.shape(len(sequences))))
        self.computed = [0] * len(sequences)

    def batch(self, counts: list[int], wanted: int | None = None) -> Batch:
        """The step that advances each sequence by its count (0 = not in this step), in a batch.

        Wants logits of all rows, or of the last `wanted`.
        """
        tokens, positions, slots, ends, context, tables = [], [], [], [0], [], []
        source = torch.tensor([s if done else -1 for s, done in enumerate(self.computed)], dtype=torch.int32)
        stored = torch.tensor([[n, 0] for n in counts], dtype=torch.int32)
        target = torch.tensor([[s, -1] for s in range(len(counts))], dtype=torch.int32)
        for s, n in enumerate(counts):
            at = torch.arange(self.computed[s], self.computed[s] + n)
            tokens.append(torch.tensor(self.sequences[s])[at])
            positions.append(at)
            slots.append(self.blocks[s][at // self.size] * self.size + at % self.size)
            self.computed[s] += n
            ends.append(ends[-1] + n)
            context.append(self.computed[s])
            tables.append(self.blocks[s])
        batch = Batch(
            tokens=torch.cat(tokens).int(),
            positions=torch.cat(positions).int(),
            slots=torch.cat(slots),
            cu_q=torch.tensor(ends, dtype=torch.int32),
            context=torch.tensor(context, dtype=torch.int32),
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int(),
            logit_rows=torch.arange(ends[-1], dtype=torch.int32)[0 if wanted is None else ends[-1] - wanted :],
            states=StateBatch(torch.tensor(ends, dtype=torch.int32), source, stored, target)
            if any(self.model.own_states)
            else None,
        )
        placed: Batch = self.model.decoder.ops.place(batch)
        return placed

    def step(self, counts: list[int], wanted: int | None = None) -> list[Tensor]:
        """The logits of `batch`."""
        batch = self.batch(counts, wanted)
        self.model.decoder.ops.begin_step()
        found = to_torch(self.model.decoder(batch, self.caches)).clone()
        return list(found.split(counts if wanted is None else [wanted]))

    def run(self, cut: list[list[int]]) -> list[Tensor]:
        """Logits [length, vocab] of every sequence after the steps `cut`, each a list of counts."""
        rows = [self.step(counts) for counts in cut]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(folder: Path, ops: Ops, **options: Any) -> Model:
    return load_model(flat_config(model=str(folder), **options), ops)


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


CUTS = {
    "whole": [[19, 7, 1]],
    "chunks": [[8, 0, 1], [3, 5, 0], [8, 2, 0]],
    "decode": [[12, 4, 1], *([[1, 1, 0]] * 3), *([[1, 0, 0]] * 4)],
    "token_by_token": [[1, 1, 1], *([[1, 1, 0]] * 6), *([[1, 0, 0]] * 12)],
}


def assert_left_out(run: Paged, full: Tensor, exact: bool) -> None:
    """Steps that want few logits or none give those of `full` [9, vocab], and the last MLP sees no row more."""
    seen: list[int] = []
    decoder = run.model.decoder
    assert isinstance(decoder, Decoder)
    last, has_mlp = decoder.layers[-1], run.model.spec.has_mlp(run.model.spec.layers - 1)
    spied = replace(last, mlp=lambda ops, x: (seen.append(len(x)), last.mlp(ops, x))[1])
    run.model = replace(run.model, decoder=replace(decoder, layers=(*decoder.layers[:-1], spied)))
    run.computed = [0] * len(run.computed)
    assert run.step([5], wanted=0)[0].shape == (0, full.shape[1])
    (got,) = run.step([4], wanted=2)
    assert seen == ([1, 2] if has_mlp else [])
    assert torch.equal(got, full[-2:]) if exact else relative_error(got, full[-2:]) <= TOLERANCE
