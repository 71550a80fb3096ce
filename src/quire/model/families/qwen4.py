"""Qwen4-exp: the gated delta rule beside attention to chosen blocks, gated residuals, and embeddings of n-grams.

Qwen Team 2026, as transformers has it (`qwen4_exp`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice
from math import isqrt
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.hybrids import (
    FURTHER,
    NAKED,
    QWEN3_5,
    QWEN_NEXT_BIASES,
    QWEN_NEXT_DEFAULTS,
    QWEN_NEXT_EXPERTS,
    QWEN_NEXT_READS,
    delta_mixers,
    delta_sizes,
    delta_windows,
    one_rope,
)
from quire.model.families.mixtures import EXPERTS, SHARED_EXPERT
from quire.model.families.names import STACKED, without
from quire.model.families.readers import read_moe
from quire.model.families.row import Family
from quire.model.layer_sizes import NO_NGRAMS, Ngrams, Streams
from quire.model.mixers.ngram_delta import HASHED
from quire.model.spec import ATTENTION
from quire.ops.convolution import MOST_TAPS
from quire.ops.indexer import PooledIndexer

WAYS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
PLE = {
    "ngram_key": "ple.key_proj",
    "ngram_value": "ple.value_proj",
    "ngram_key_norm": "ple.norm_key",
    "ngram_query_norm": "ple.norm_query",
    "ngram_value_norm": "ple.norm_conv",
    "ngram_conv": "ple.conv1d",
}
NAMES = without(QWEN3_5, "attn_norm", "mlp_norm", "final_norm", "gate", "up", "down") | EXPERTS | SHARED_EXPERT | {
    "pooled_index_qk": "self_attn.indexer.index_qk_proj",
    "pooled_index_q_norm": "self_attn.indexer.q_layernorm",
    "pooled_index_k_norm": "self_attn.indexer.k_layernorm",
    **{f"residual_{part}_{way}": f"{part}_hyper_connection.{name}" for part in ("attn", "mlp")
       for way, name in WAYS.items()},
    **{f"residual_head_{way}": f"model.hyper_connection_mixer.{WAYS[way]}" for way in ("norm", "down", "up")},
    **PLE,
}  # fmt: skip
REQUIRED = (
    *("q_norm", "k_norm", "attn_gate", "shared_switch"),
    *(f"pooled_index_{role}" for role in ("q", "k", "q_norm", "k_norm")),
    *(role for role in NAMES if role.startswith("residual_")),
)
BITS = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed_bits(value: int) -> int:
    """A number of 64 bits of another (SplitMix64, Steele et al. 2014)."""
    value = (value + GOLDEN) & BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & BITS
    return value ^ value >> 31


def hash_factors(seed: int, tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Odd numbers whose products with tokens have 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    return tuple(2 * (mixed_bits((seed + GOLDEN * (i + 1)) & BITS) % half) + 1 for i in range(tokens))


def primes(least: int, wanted: int) -> tuple[int, ...]:
    """The first primes that are not below `least`."""
    found = (n for n in count(max(2, least)) if all(n % d for d in range(2, isqrt(n) + 1)))
    return tuple(islice(found, wanted))


def read_ngrams(config: HfConfig, layers: int) -> Ngrams:
    """The layer that `ple_layer_ids` names, counted from 1; several are refused."""
    named = sorted(set(config.integers("ple_layer_ids")))
    if not named:
        return NO_NGRAMS
    if len(named) > 1 or not 1 <= named[0] <= layers:
        raise config.fail("ple_layer_ids", f"is {named}; it may name one layer from 1 to {layers}")
    if delta_mixers(config, layers)[named[0] - 1] == ATTENTION:
        raise config.fail("ple_layer_ids", f"names layer {named[0]}, which must be one of linear_attention")
    tokens = config.integer("ngram_size", low=2, high=8)
    heads = (tokens - 1) * config.integer("heads_per_ngram", high=1 << 8)
    width = config.integer("ple_embed_dim", config.integer("hidden_size"), high=1 << 20)
    if width % heads:
        raise config.fail("ple_embed_dim", f"is {width}, must be a multiple of the {heads} rows of a token")
    taps = config.integer("ple_conv_kernel_size", low=2, high=(MOST_TAPS - 1) // tokens + 1)
    vocab_size = config.integer("vocab_size", high=(1 << 24) - 2)
    factors = config.integers("ngram_factors") or hash_factors(config.integer("seed", low=0), tokens, vocab_size)
    sizes = config.integers("ngram_sizes") or primes(config.integer("ngram_vocab_size_base", high=1 << 27), heads)
    if len(factors) != tokens or len(sizes) != heads or not all(0 < f * vocab_size < 1 << 63 for f in factors):
        raise config.fail("ngram_size", f"is {tokens}; {len(factors)} factors and {len(sizes)} sizes do not fit it")
    divisor = config.integer("make_ngram_vocab_size_divisible_by", high=1 << 20)
    rows = config.integer("ngram_rows", -(-sum(sizes) // divisor) * divisor, low=sum(sizes), high=(1 << 31) - 1)
    ends = config.token_ids("ngram_end", vocab_size) or config.token_ids("eos_token_id", vocab_size)
    if not ends:
        raise config.fail("eos_token_id", "is missing; n-grams do not reach beyond it")
    return Ngrams(named[0] - 1, tokens, heads, width, taps, factors, sizes, rows, ends[0])


def read_pooled(config: HfConfig, layers: int) -> PooledIndexer:
    """All layers that attend have an indexer."""
    if config.integer("indexer_kv_heads") != 1:
        raise config.fail("indexer_kv_heads", "must be 1")
    size, budget = config.integer("indexer_compress_ratio", high=MOST_TAPS), config.integer("indexer_budget")
    if budget % size or size & size - 1:
        raise config.fail(
            "indexer_compress_ratio", f"is {size}, must be a power of two that divides indexer_budget {budget}"
        )
    own = tuple(kind == ATTENTION for kind in delta_mixers(config, layers))
    heads, width = config.integer("indexer_n_heads", high=1 << 10), config.integer("indexer_head_dim", high=1 << 12)
    if width % 8 or width < one_rope(config, layers)[0].dim:
        raise config.fail("indexer_head_dim", f"is {width}, must be a multiple of 8, and have all that turns of a head")
    return PooledIndexer(heads, width, size, budget // size, own)


def read_streams(config: HfConfig, layers: int) -> Streams:
    """How many there are, and the space of their gates."""
    return Streams(config.integer("hc_count", low=2, high=16), gate_rank=config.integer("hc_lowrank", high=1 << 16))


def read_delta(config: HfConfig, layers: int) -> DeltaSizes:
    """Qwen3.5's, whose gate may be a sigmoid."""
    gate = config.text("output_gate_type", "") or config.text("hidden_act", "silu")
    if gate not in ("silu", "sigmoid"):
        raise config.fail("output_gate_type", f"{gate!r} is not known; known: silu, sigmoid")
    return replace(delta_sizes(config, layers), gate=gate)


def read_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that convolutions of a layer read: where there are n-grams, those of the longer one."""
    ngrams, windows = read_ngrams(config, layers), delta_windows(config, layers)
    return tuple(max(size, ngrams.reach, ngrams.tokens) if ngrams.at(i) else size for i, size in enumerate(windows))


DEFAULTS: dict[str, Any] = QWEN_NEXT_DEFAULTS | QWEN_NEXT_EXPERTS | {
    "num_key_value_heads": 2, "intermediate_size": 512, "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4,
    "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "seed": 1234,
    "make_ngram_vocab_size_divisible_by": 128, "partial_rotary_factor": 1.0,
}  # fmt: skip


def tables(config: HfConfig) -> dict[str, str]:
    """The name of the table of n-grams, where there is one."""
    named = config.integers("ple_layer_ids")
    return {"ngram_table": f"model.layers.{named[0] - 1}.ple.ple_embedding.ngram_embedding"} if named else {}


READS = QWEN_NEXT_READS | {
    "moe": read_moe(), "delta": read_delta, "windows": read_windows, "streams": read_streams, "pooled": read_pooled,
    "ngrams": read_ngrams,
}  # fmt: skip


def qwen4_exp(config: HfConfig) -> Family:
    """Qwen3.5's mixture with blocks chosen, several streams, and n-grams in a layer."""
    table = tables(config)
    required = (*REQUIRED, *table, *(PLE if table else ()))
    return Family(
        NAMES | table, DEFAULTS, READS, required, QWEN_NEXT_BIASES, {"norm": "rms1p", "join": "own"},
        rewrites=(*NAKED, *STACKED), skipped=FURTHER, buffers=tuple(f".ple_embedding.{name}" for name in HASHED),
        stacks=dict.fromkeys(table, ".shard_{}"),
    )  # fmt: skip
