"""GGUF's architecture of Qwen4-exp: keys of blocks, gated residuals, and embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import TensorShapes
from quire.model.disk.gguf_hybrids import QWEN3_5
from quire.model.disk.hf_config import HfConfig
from quire.model.families.qwen4 import read_ngrams

TABLE = "per_layer_token_embd"
PLE = {"key": "ple_key", "value": "ple_value", "conv": "ple_conv1d", "key_norm": "ple_norm_key",
       "query_norm": "ple_norm_query", "value_norm": "ple_norm_conv"}  # fmt: skip
PARTS = {"attn": "hc_attn", "mlp": "hc_ffn", "head": "output_hc"}
LISTS = {
    "ratios": "attention.compress_ratios",
    "ngram_layers": "ple.layers",
    "ngram_factors": "ple.layer_multipliers",
    "ngram_firsts": "ple.head_offsets",
    "ngram_sizes": "ple.head_vocab_sizes",
}
FIELDS = {
    "hc_count": "hyper_connection.count",
    "hc_lowrank": "hyper_connection.low_rank",
    "indexer_n_heads": "attention.indexer.head_count",
    "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
    "ngram_size": "ple.ngram_size",
    "heads_per_ngram": "ple.heads_per_ngram",
    "ple_conv_kernel_size": "ple.conv_kernel",
    "ngram_end": "ple.eos_token_id",
    "ngram_width": "embedding_length_per_layer_input",
}


def fields_of_ngrams(raw: Mapping[str, Any], has: TensorShapes) -> dict[str, Any]:
    """Tokens of a block, which are as many in all layers that attend, and what n-grams are made of."""
    ratios = set(raw.get("ratios") or [0]) - {0}
    if len(ratios) != 1:
        raise ModelError(f"{LISTS['ratios']}: one number is needed, the same in every layer that attends")
    found: dict[str, Any] = {"indexer_compress_ratio": ratios.pop(), "indexer_kv_heads": 1, "ple_layer_ids": []}
    if not raw.get("ngram_layers"):
        return found
    sizes, firsts = raw.get("ngram_sizes") or [], raw.get("ngram_firsts") or []
    if firsts != [0, *accumulate(sizes[:-1])]:
        raise ModelError(f"{LISTS['ngram_firsts']}: rows must follow each other")
    width = raw["ngram_width"] * len(sizes) if isinstance(raw["ngram_width"], int) else 0
    found |= {"ple_layer_ids": [layer + 1 for layer in raw["ngram_layers"]], "ple_embed_dim": width}
    return found | {"ngram_rows": max(sum(sizes), has.rows(f"{TABLE}.weight"))}


def keys_of_ngrams(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of each layer, and of n-grams, of config.json."""
    config, layers = HfConfig(dict(raw), ""), raw["num_hidden_layers"]
    attends = [kind != "linear_attention" for kind in raw["layer_types"]]
    found: dict[str, Any] = {"ratios": np.array(attends, np.int32) * raw["indexer_compress_ratio"]}
    ngrams = read_ngrams(config, layers)
    if not ngrams.tokens:
        return found | dict.fromkeys(("ngram_size", "heads_per_ngram", "ple_conv_kernel_size"))
    firsts = list(accumulate(ngrams.sizes, initial=0))[:-1]
    lists = {"ngram_factors": ngrams.factors, "ngram_sizes": ngrams.sizes, "ngram_firsts": firsts}
    found |= {name: np.array(values, np.uint64) for name, values in lists.items()}
    found |= {"ngram_layers": np.array([ngrams.layer], np.int32), "ngram_end": ngrams.end}
    return found | {"ngram_width": ngrams.width // ngrams.heads}


QWEN4 = replace(
    QWEN3_5,
    model_type="qwen4_exp_text",
    extra=(*QWEN3_5.extra, "ple.image_token_id"),
    names={
        "ngram_table": TABLE,
        **{f"ngram_{role}": name for role, name in PLE.items()},
        **{f"residual_{part}_{way}": f"{name}_{way}" for part, name in PARTS.items()
           for way in ("norm", "down", "up", "inject")},
        **{f"pooled_index_{part}": f"indexer.{part}_proj" for part in "qk"},
        **{f"pooled_index_{part}_norm": f"indexer.{part}_norm" for part in "qk"},
    },
    facts={"output_gate_type": "sigmoid", "norm_topk_prob": True},
    fields={**QWEN3_5.fields, **FIELDS},
    lists=LISTS,
    further=fields_of_ngrams,
    tell=keys_of_ngrams,
)  # fmt: skip
"""llama.cpp has one layer with n-grams, and sigmoids for gates of the delta rule."""
