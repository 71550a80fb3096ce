"""Tiny models with experts, latents, encoders, windows or borrowed code, by the options of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention_variants import GATED, GATED_DENSE, LATENT_VARIANTS
from chunked_models import CHUNKED, CHUNKED_MIXTURES
from dense_variants import SHARED_DENSE
from gemma_variants import GEMMAS
from loaded_folders import KEPT
from mixture_variants import NEWER
from paged_model import FALCON, JAMBA, MAMBA2, SCANS, YARN, Paged, nemotron
from quire.core.dtypes import BF16
from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.mixers.mixer import LayerCacheSpec
from quire.ops.layout import KVLayout

SMALL_ENCODER = {"d_ff": 96, "d_kv": 16}
NEAR = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", SMALL_ENCODER),
    "t5_v1_1": ("t5", SMALL_ENCODER | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                             "decoder_start_token_id": 0}),
    "t5_unequal": ("t5", SMALL_ENCODER | NEAR | {"num_decoder_layers": 2, "num_layers": 4, "d_kv": 24}),
    "t5_shallow_encoder": ("t5", SMALL_ENCODER | NEAR | {"num_decoder_layers": 3, "num_layers": 1,
                                                 "feed_forward_proj": "gated-silu"}),
    "mt5": ("mt5", SMALL_ENCODER),
}  # fmt: skip


class Encoded(Paged):
    """Sequences of a decoder behind what an encoder made of `prompts`, in the same cache."""

    def __init__(self, model: Model, prompts: list[list[int]], sequences: list[list[int]], seed: int = 0) -> None:
        super().__init__(model, [*prompts, *sequences], seed)
        n, size = len(prompts), self.size
        self.sequences, self.computed = sequences, [0] * n
        self.encoded, self.blocks = self.blocks[:n], self.blocks[n:]
        self.lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
        assert model.encoder is not None
        for number, (tokens, blocks) in enumerate(zip(prompts, self.encoded, strict=True)):
            at = torch.arange(len(tokens))
            slots = blocks[at // size] * size + at % size
            given = model.decoder.ops.place((self.given(number, tokens), slots))
            model.encoder(*given, self.caches)

    def given(self, number: int, tokens: list[int]) -> torch.Tensor:
        """What the encoder reads of prompt `number`."""
        return torch.tensor(tokens, dtype=torch.int32)

    def batch(self, counts: list[int], wanted: int | None = None) -> Batch:
        batch = super().batch(counts, wanted)
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        tables = torch.nn.utils.rnn.pad_sequence(self.encoded, batch_first=True).int()
        each = torch.arange(len(rows) + 1, dtype=torch.int32)
        cross = replace(batch, cu_q=each, context=self.lengths[rows], block_tables=tables[rows])
        return replace(batch, cross=self.model.decoder.ops.place(cross))


LATENT_SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
LATENT_GROUPS = {"n_group": 4, "topk_group": 2}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.2}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", LATENT_SIZES | {"routed_scaling_factor": 1.5}),
    "deepseek_v2_groups": ("deepseek_v2", LATENT_SIZES | LATENT_GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2_straight": ("deepseek_v2", LATENT_SIZES | {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", LATENT_SIZES | LATENT_GROUPS),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        LATENT_SIZES | LATENT_GROUPS | {"rope_parameters": YARN | MSCALE, "norm_topk_prob": False},
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        LATENT_SIZES | LATENT_GROUPS | {"rope_interleave": False, "attention_bias": True},
    ),
    "deepseek_v3_dense": (
        "deepseek_v3",
        LATENT_SIZES | LATENT_GROUPS | {"first_k_dense_replace": 3, "q_lora_rank": None},
    ),
    **LATENT_VARIANTS,
}

EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1,
          "first_k_dense_replace": 1}  # fmt: skip
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2,
         "tie_word_embeddings": False}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 48}
NEMOTRON_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                    "moe_shared_expert_intermediate_size": 48}  # fmt: skip
KIMI = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "kv_lora_rank": 32, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 8,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "linear_head_dim": 32, "linear_num_heads": 8}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", EIGHT),
    "mixtral_window": ("mixtral", {"num_local_experts": 3, "sliding_window": 5}),
    "qwen2_moe": ("qwen2_moe", NARROW | SHARED),
    "qwen2_moe_some_dense": ("qwen2_moe", NARROW | SHARED | {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", NARROW | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe_some_dense": ("qwen3_moe", NARROW | {"head_dim": 16, "mlp_only_layers": [1], "attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe_clipped": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 6, "clip_qkv": 0.9, "norm_topk_prob": True}),
    "phimoe": ("phimoe", EIGHT | {"router_jitter_noise": 0.1}),
    "phimoe_biases": ("phimoe", EIGHT | {"attention_bias": True, "lm_head_bias": True}),
    "glm4_moe": ("glm4_moe", ROUTED),
    "glm4_moe_norms": ("glm4_moe", ROUTED | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True,
                                             "routed_scaling_factor": 2.5}),
    "dots1": ("dots1", ROUTED | {"head_dim": 24}),
    "dots1_window": ("dots1", ROUTED | {"head_dim": 16, "norm_topk_prob": True, "sliding_window": 5,
                                        "max_window_layers": 1, "n_shared_experts": 2}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe_biases": ("ernie4_5_moe", ERNIE | {"use_bias": True, "moe_num_shared_experts": 1,
                                                     "moe_layer_interval": 2, "moe_layer_end_index": 1}),
    "ernie4_5_moe_alone": ("ernie4_5_moe", ERNIE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    "gpt_oss": ("gpt_oss", EIGHT | {"head_dim": 16, "sliding_window": 5}),
    "lfm2_moe": ("lfm2_moe", NARROW | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"],
                                       "tie_word_embeddings": False}),
    "lfm2_moe_scaled": ("lfm2_moe", NARROW | {"num_dense_layers": 0, "layer_types": ["full_attention", "conv", "conv"],
                                              "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True,
                                              "routed_scaling_factor": 2.5, "tie_word_embeddings": False}),
    "qwen3_next": ("qwen3_next", NARROW | SHARED | {
        "head_dim": 16, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 16}),
    "qwen3_5_moe": ("qwen3_5_moe_text", NARROW | SHARED | {
        "head_dim": 16, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 16}),
    "granite4": ("granitemoehybrid", SCANS | {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 6, "num_experts_per_tok": 3,
        "shared_intermediate_size": 48, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "attention_multiplier": 0.3}),
    "nemotron_3": nemotron("ME*EM", **NEMOTRON_EXPERTS, routed_scaling_factor=2.5),
    "nemotron_3_latents": nemotron("MEM*-E", **NEMOTRON_EXPERTS, moe_latent_size=32, norm_topk_prob=False, n_group=4,
                                   topk_group=2),
    "jamba": ("jamba", JAMBA | {"num_experts": 6, "num_experts_per_tok": 3}),
    "kimi_linear": ("kimi_linear", KIMI),
    "kimi_linear_few": ("kimi_linear", KIMI | {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}),
    "gpt_oss_full": ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 24, "swiglu_limit": 0.3,
                                 "layer_types": ["full_attention"] * 3}),
    **GATED,
    **CHUNKED_MIXTURES,
    **NEWER,
}  # fmt: skip

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"head_dim": 16}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "xielu": ("apertus", PLAIN_ROPE),
    "norms_after_rope": ("hunyuan_v1_dense", HEADS),
    "experts": ("hunyuan_v1_moe", HEADS | EXPERTS | {"moe_topk": 2}),
    "heads_of_unlike_sizes": ("gemma4_text", HEADS | {"sliding_window": 5, "global_head_dim": 32,
                              "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "values_shorter_than_keys": ("axk1", LATENT_SIZES | LATENT_GROUPS),
    "post_norms_and_windows": ("modernbert-decoder", {"sliding_window": 5}),
    "fused_qkv": ("persimmon", {}),
    "sinks": ("granite_swa", HEADS | {"sliding_window": 5}),
}  # fmt: skip

LOCAL, FULL = "sliding_attention", "full_attention"
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 10,
                               "layer_types": [LOCAL, LOCAL, FULL] * 3 + [LOCAL]}),
    "gpt_oss": ("gpt_oss", EIGHT | {"head_dim": 16, "num_hidden_layers": 2, "layer_types": [LOCAL, FULL]}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4}),
    "mistral": ("mistral", {}),
    "gemma4": GEMMAS["gemma4_windows"],
    "gemma4_small": GEMMAS["gemma4_small_windows"],
    "lfm2": ("lfm2", {"num_hidden_layers": 6, "layer_types": ["conv", "conv", FULL] * 2, "block_multiple_of": 32}),
    **CHUNKED,
}  # fmt: skip
GEMMA3 = {
    "1b": (26, 4, 1, 256, 512),
    "4b": (34, 5, 4, 256, 1024),
    "12b": (48, 8, 8, 256, 1024),
    "27b": (62, 10, 16, 128, 1024),
}
"""Layers, those that see everything (every sixth), key/value heads, head size, window of the published sizes."""


def gemma3(size: str, first: int = 0) -> dict[int, LayerCacheSpec]:
    """What the layers of a published size keep, by numbers from `first` on."""
    layers, _, kv_heads, head_dim, window = GEMMA3[size]
    layout = KVLayout(16, kv_heads, head_dim, BF16)
    return {first + i: LayerCacheSpec((layout,), 0 if i % 6 == 5 else window) for i in range(layers)}


SKEWED = (90, 1, 50, 3, 2, 40, 1, 1)
"""How often eight experts are used."""

SHARED_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied head": ("llama", {"tie_word_embeddings": True, "vocab_size": 101}),
    "one key/value head": ("llama", {"num_key_value_heads": 1}),
    "norms of whole rows": ("olmo2", {}),
    "norms of heads": ("qwen3", {"head_dim": 24}),
    "norms with a weight per head": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "norms with a weight per head, interleaved rope": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "slopes": ("bloom", {}),
    "fused by key/value head": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "fused and transposed": ("gpt2", {}),
    "parallel": ("gpt_neox", {}),
    "post norms": ("gemma2", {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "experts": ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
                              "num_experts_per_tok": 2}),
    "latents": KEPT["latents"][:2],
    "convolutions": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "block_multiple_of": 32, "conv_bias": True}),
    "scans beside experts": MIXTURES["granite4"],
    "scans of one group": ("mamba2", MAMBA2 | {"n_groups": 1}),
    "layers of one part": nemotron("ME*-M", **NEMOTRON_EXPERTS, use_bias=True, mlp_bias=True),
    "latent experts": nemotron("ME*E", **NEMOTRON_EXPERTS, moe_latent_size=32),
    "scans beside attention": ("falcon_h1", FALCON | {"mamba_n_groups": 1, "ssm_multipliers": [0.3, 0.5, 0.7, 0.9, 1.1],
                                                      "mlp_multipliers": [0.8, 0.3], "projectors_bias": True}),
    "chunks": CHUNKED["llama4"],
    "layers of unlike sizes": GEMMAS["gemma4_keys_as_values"],
    "experts beside an MLP": GEMMAS["gemma4_experts"],
    "per-layer embeddings": GEMMAS["gemma4_layer_inputs"],
    "several streams": GEMMAS["gemma3n_sparse"],
    "gates": GATED["afmoe"],
    "gates of heads, which layers have in unlike numbers": GATED["laguna"],
    "gates of heads beside latents, decays of channels": MIXTURES["bailing_hybrid"],
    "decays of heads that are fixed": MIXTURES["minimax"],
    "norms that replace the stream, factors": MIXTURES["minimax_factors"],
    "gates, and norms with an epsilon of their own": GATED_DENSE["muse_glimmer_thetas"],
    "stacks that run in turns": GATED_DENSE["hrm_text"],
    "experts that pass a layer by": LATENT_VARIANTS["longcat_flash"],
    "activations limited by layer": GATED["step3p5"],
    "values shorter than keys": GATED["mimo_v2_flash"],
    "sinks, and experts with biases": KEPT["experts_with_biases"][:2],
    **SHARED_DENSE,
}  # fmt: skip
