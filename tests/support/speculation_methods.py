"""Every method of speculation as engines take it, requests for it, and their answers."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

import paths
from engine_answers import Answer
from lora_adapters import write_adapter
from model_variants import EIGHT, KIMI
from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from oracle import write
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from turns import turns

PYDOC = str(paths.PYDOC)
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "suffix_decoding_max_spec_factor": 4.0,
    },
    "self_int4": {"method": "self", "quantization": "int4", "num_speculative_tokens": 3},
    "self_layers": {"method": "self", "layers": 1, "num_speculative_tokens": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa"},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "dflash": {"method": "dflash", "num_speculative_tokens": 5},
}
GROWN = {"topk": 3, "num_draft_tokens": 9, "num_speculative_tokens": 3}
METHODS |= {
    "ngram_tree": {"method": "ngram", "prompt_lookup_min": 1} | GROWN,
    "suffix_tree": {"method": "suffix", "prompt_lookup_min": 1, "suffix_decoding_max_spec_factor": 4.0} | GROWN,
    "self_tree": {"method": "self", "quantization": "int4"} | GROWN,
    "draft_model_tree": {"method": "draft_model"} | GROWN,
    "medusa_tree": {"method": "medusa", "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]"},
    "eagle_tree": {"method": "eagle"} | GROWN,
    "eagle3_tree": {"method": "eagle3"} | GROWN,
}
INDEXED = SIZES | {"q_lora_rank": 32, "v_head_dim": 16, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 12}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 20,
                                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "experts": ("gpt_oss", EIGHT | {"head_dim": 16, "sliding_window": 16}),
    "latents": ("deepseek_v3", SIZES | GROUPS | {"q_lora_rank": 32, "v_head_dim": 16}),
    "states": ("qwen3_5_text", {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                                "linear_value_head_dim": 8}),
    "scans": ("granitemoehybrid", EIGHT | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "shared_intermediate_size": 32}),
    "layers_of_one_part": ("nemotron_h", {
        "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*E", "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}),
    "beside": ("falcon_h1", {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
                             "mamba_d_state": 16, "mamba_n_groups": 2, "key_multiplier": 0.5,
                             "mlp_multipliers": [0.7, 0.4], "ssm_out_multiplier": 0.5}),
    "channel_scans": ("jamba", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                                "mamba_d_state": 8, "num_experts": 4, "num_experts_per_tok": 2}),
    "shared_blocks": ("zamba2", {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "n_mamba_heads": 8,
        "mamba_ngroups": 2, "mamba_d_state": 16, "adapter_rank": 32, "num_key_value_heads": 4, "use_mem_rope": True,
        "use_shared_attention_adapter": True}),
    "scans_alone": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "convolutions": ("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
                              "block_multiple_of": 32}),
    "all_windows": ("mistral", {"sliding_window": 20}),
    "decays of channels": ("kimi_linear", KIMI | {"v_head_dim": 16}),
    "indexers": ("deepseek_v32", INDEXED | GROUPS),
    "block indexers": ("minimax_m3_vl_text", {
        "head_dim": 16, "rotary_dim": 16, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
        "index_topk_blocks": 2, "dense_intermediate_size": 96, "intermediate_size": 32, "shared_intermediate_size": 64,
        "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.5, "mlp_layer_types": ["dense", "sparse",
        "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}),
    "pooled indexers": ("qwen4_exp_text", {
        "num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "hc_count": 2, "hc_lowrank": 32, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 32, "indexer_compress_ratio": 16, "ple_layer_ids": [3], "ple_embed_dim": 32,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2}),
    "entries": ("deepseek_v4", {
        "head_dim": 32, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16,
        "sliding_window": 12, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "partial_rotary_factor": 0.25,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        "mlp_layer_types": ["hash_moe", "moe", "moe"]}),
    "gated pools": ("glm5_next_text", {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "q_lora_rank": 32, "linear_head_dim": 16, "linear_num_heads": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "index_n_heads": 8, "index_head_dim": 16,
        "index_topk": 8, "index_kpool": 4}),
    "shared indexers": ("glm_moe_dsa", INDEXED | {
        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}),
}  # fmt: skip


def write_words(folder: Path, count: int, first: str = "<pad>") -> Path:
    """A tokenizer of `count` words."""
    words = {first: 0} | {f"w{i}": i for i in range(1, count)}
    Tokenizer(models.WordLevel(words, unk_token=first)).save(str(folder / "tokenizer.json"))
    return folder


def write_speaking(folder: Path, kind: str, **more: Any) -> Path:
    """A tiny model of `TINY` in f32, with `more` facts and the vocabulary and tokenizer of the embedded one."""
    family, facts = TINY[kind]
    own = facts | {"vocab_size": 6144, "max_position_embeddings": 256} | more
    write(folder, family, **own, dtype=torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(PYDOC) / name, folder)
    return folder


def write_adapter_of_the_embedded(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    return str(write_adapter(folder, oracle, ("q_proj", "v_proj", "down_proj"), 1))


def requests_of(vocab: int, adapter: str) -> list[Request]:
    """Prompts that repeat themselves, under every parameter that changes a token or its log-probability."""
    rng = random.Random(7)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -5.0}, "min_tokens": 12},
        {"temperature": 0.5, "allowed_token_ids": tuple(range(5, 60))},
        {"temperature": 0.8, "n": 3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.6, "stop_token_ids": tuple(range(20, 30))},
    ]
    made = []
    for i, way in enumerate(ways * 2):
        stem = [rng.randrange(3, vocab) for _ in range(rng.choice((3, 9, 17)))]
        prompt = (stem * 12)[: rng.choice((1, 20, 40, 70))]
        params = SamplingParams(max_tokens=rng.choice((1, 2, 9, 30, 40)), logprobs=2, **way)
        words = ((stem[0], stem[1]), (stem[2],)) if i % 4 == 1 else ()
        name = adapter if i % 3 == 0 else ""
        made.append(
            Request(
                id=f"r{i}",
                prompt=tuple(prompt),
                params=params,
                seed=i,
                arrival=0.0,
                eos_token_ids=(2,),
                bad_words_ids=words,
                adapter=name,
            )
        )
    return made


def answers(engine: LocalEngine, requests: list[Request]) -> dict[str, list[Answer]]:
    """What every sequence gave, trickling in at random steps."""
    alone = {r.id: [Answer([], []) for _ in range(r.params.n)] for r in requests}
    rng, waiting = random.Random(5), list(requests)
    for _ in turns(lambda: waiting or engine.engine.has_work):
        batch = waiting[: rng.randint(0, 6)]
        for request in batch:
            engine.submit(request)
        del waiting[: len(batch)]
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None, out.error
            answer = alone[out.request_id][out.index]
            answer.tokens += out.tokens
            answer.logprobs += [*(out.prompt_logprobs or ()), *out.logprobs]
            answer.reason = out.finish_reason
        engine.engine.pool.check()
    engine.engine.check()
    return alone
