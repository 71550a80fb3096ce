"""GGUF's architectures of Gemma 3n and 4: layers of two sizes, per-layer embeddings, several streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import KEY_LENGTHS, KV_HEADS, TURNED, VALUE_LENGTHS, WIDTH, WINDOW
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.gemma3n import read_streams
from quire.model.spec import ModelSpec

FULL, LOCAL = "full_attention", "sliding_attention"
INPUT_NAMES = {
    "input_table": "per_layer_token_embd",
    "input_rows": "per_layer_model_proj",
    "input_rows_norm": "per_layer_proj_norm",
    "input_gate": "inp_gate",
    "input_project": "proj",
    "input_norm": "post_norm",
}
INPUT_FIELDS = {
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}
STREAM_NAMES = {
    **{f"enter_stream_{i + 1}": f"altup_proj.{i}" for i in range(3)},
    **{f"leave_stream_{i + 1}": f"altup_unembd_proj.{i}" for i in range(3)},
    "stream_norm": "altup_router_norm",
    "stream_router": "altup_router",
    "stream_predict": "altup_predict_coef",
    "stream_correct": "altup_correct_coef",
    "stream_factors": "altup_correct_scale",
    "laurel_left": "laurel_l",
    "laurel_right": "laurel_r",
    "laurel_norm": "laurel_post_norm",
}
SPARSITY = "activation_sparsity_pattern"


def part_of_head(raw: Mapping[str, Any], turned: str, size: str) -> dict[str, Any]:
    """How much of a head of `size` numbers turns; half a number more is not rounded down past the whole one."""
    numbers, dim = raw.get(turned), raw.get(size)
    return {"partial_rotary_factor": (numbers + 0.5) / dim} if numbers and dim and numbers < dim else {}


def layers_of_gemma4(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Heads of keys and values of both kinds of layers, the width of MLPs that is not doubled, and both ropes.

    Layers that see everything and have no matrix of values use their keys. What no key records is as in published
    folders: in models without per-layer embeddings, rows of an image see each other.
    """
    layers, kinds = raw["num_hidden_layers"], raw.get("layer_types") or [FULL] * raw["num_hidden_layers"]
    own = range(layers - (raw.get("num_kv_shared_layers") or 0))
    whole = [i for i in own if kinds[i] == FULL]
    heads = raw[KV_HEADS] if isinstance(raw[KV_HEADS], list) else [raw[KV_HEADS]] * layers
    widths = raw[WIDTH] if isinstance(raw[WIDTH], list) else [raw[WIDTH]]
    found = {kind: next((n for n, own in zip(heads, kinds, strict=False) if own == kind), heads[0])
             for kind in (LOCAL, FULL)}  # fmt: skip
    theta, ropes = {"rope_theta": raw["rope_theta"]}, raw.get("rope_parameters") or {}
    whole_rope = ropes.get(FULL) or theta | (raw.get("rope_scaling") or {})
    return {
        KV_HEADS: found[LOCAL],
        "num_global_key_value_heads": found[FULL],
        "attention_k_eq_v": bool(whole) and not any(has(f"blk.{i}.attn_v.") for i in whole),
        WIDTH: widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "enable_moe_block": bool(raw["num_experts"]),
        "vocab_size_per_layer_input": raw["vocab_size"],
        "use_bidirectional_attention": None if raw.get("hidden_size_per_layer_input") else "vision",
        "final_logit_softcapping": raw.get("final_logit_softcapping") or None,
        "rope_scaling": None,
        "rope_parameters": {
            FULL: part_of_head(raw, "turned", "global_head_dim") | whole_rope,
            LOCAL: part_of_head(raw, "turned_local", "head_dim") | (ropes.get(LOCAL) or theta),
        },
    }


def cap_of_gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What caps logits, 0 where nothing does: without the key llama.cpp caps them at 30."""
    return {"final_logit_softcapping": raw.get("final_logit_softcapping") or 0.0}


def sparsity_of_gemma3n(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The share of gates that are 0 of each layer, by where the normal distribution has it, and rows for all tokens."""
    shares = [round(NormalDist().cdf(at), 7) for at in raw[SPARSITY]] if raw.get(SPARSITY) else None
    return {SPARSITY: shares, "vocab_size_per_layer_input": raw["vocab_size"]}


def cutoffs_of_gemma3n(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Where the normal distribution has the share of gates that are 0; without any below all numbers."""
    shares = read_streams(HfConfig(dict(raw), ""), raw["num_hidden_layers"]).sparsity
    return {SPARSITY: [NormalDist().inv_cdf(share) if share else float("-inf") for share in shares]}


def rows_for_all(spec: ModelSpec) -> tuple[int, int]:
    """The shape of a table of per-layer embeddings with rows of all tokens."""
    return spec.vocab_size, spec.layers * spec.inputs.width


def with_rows_for_all(spec: ModelSpec) -> ModelSpec:
    """The facts of a model with such a table."""
    return replace(spec, inputs=replace(spec.inputs, vocab_size=spec.vocab_size if spec.inputs.width else 0))


GEMMAS: dict[str, Architecture] = {
    "gemma4": Architecture(
        "gemma4_text",
        extra=(*WINDOW, *KEY_LENGTHS, *VALUE_LENGTHS, *TURNED),
        names=INPUT_NAMES
        | {
            "stream_scale": "layer_output_scale",
            "expert_norm": "pre_ffw_norm_2",
            "dense_post_norm": "post_ffw_norm_1",
            "expert_post_norm": "post_ffw_norm_2",
        },
        spelling=(("num_experts_per_tok", "top_k_experts"),),
        fields=INPUT_FIELDS
        | {"head_dim": KEY_LENGTHS[1], "global_head_dim": KEY_LENGTHS[0]}
        | {"turned": TURNED[0], "turned_local": TURNED[1]},
        turns=False,
        ragged=(KV_HEADS, WIDTH),
        naked=("router_scale", "expert_scale"),
        shapes={"input_table": rows_for_all},
        further=layers_of_gemma4,
        tell=cap_of_gemma4,
        stored=with_rows_for_all,
        also=("gemma4_unified_text",),
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        extra=WINDOW,
        names=INPUT_NAMES | STREAM_NAMES,
        fields=INPUT_FIELDS | {"altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx"},
        ragged=(WIDTH,),
        lists={SPARSITY: "activation_sparsity_scale"},
        rewrites=(Rewrite(r"(altup_(?:unembd_)?proj)\.(\w+)", r"\1.{}.\2", stacked=True),),
        further=sparsity_of_gemma3n,
        tell=cutoffs_of_gemma3n,
        shapes={"input_table": rows_for_all},
        stored=with_rows_for_all,
        all_keys=True,
    ),
}
