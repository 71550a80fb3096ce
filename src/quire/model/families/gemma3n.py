"""Gemma 3n: several streams (AltUp), Laurel, per-layer embeddings, gates that few numbers pass, shared keys and values.

Gemma Team 2025.
"""

from __future__ import annotations

from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.gemma import INPUTS, gemma4, gemma4_unified, per_layer_inputs
from quire.model.families.names import BIAS_FLAGS, GEMMA, POST_NORMS, naked
from quire.model.families.readers import alternating, embed_scale, gemma3_rope
from quire.model.families.row import Family, sliding_windows
from quire.model.layer_sizes import LayerSizes, Streams

STREAMS = {
    **{f"enter_stream_{i + 1}": f"model.altup_projections.{i}" for i in range(3)},
    **{f"leave_stream_{i + 1}": f"model.altup_unembed_projections.{i}" for i in range(3)},
    "stream_norm": "altup.router_norm",
    "stream_router": "altup.modality_router",
    "stream_predict": "altup.prediction_coefs",
    "stream_correct": "altup.correction_coefs",
    "stream_factors": "altup.correct_output_scale",
    "laurel_left": "laurel.linear_left",
    "laurel_right": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
}
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "layer_types": alternating(5),
    "rope_theta": 1e6,
    "num_kv_shared_layers": 15,
    "vocab_size_per_layer_input": 262144,
}


def read_streams(config: HfConfig, layers: int) -> Streams:
    """Sizes of AltUp and Laurel, and how sparse gates are: 0.95 in the first ten layers unless the file says it."""
    count = config.integer("altup_num_inputs", 4)
    if not 2 <= count <= 4:
        raise config.fail("altup_num_inputs", f"is {count}; 2 to 4 are supported")
    if config.integer("altup_active_idx", 0, low=0) or not config.flag("altup_correct_scale", True):
        raise config.fail("altup_active_idx", "must be 0, and altup_correct_scale true; nothing else is supported")
    sparse = 10 if layers > 10 else 0
    usual = [0.95] * sparse + [0.0] * (layers - sparse)
    given = config.raw.get("activation_sparsity_pattern", usual)
    given = usual if given is None else given if isinstance(given, list) else [given] * layers
    if len(given) != layers or not all(isinstance(share, (int, float)) and 0 <= share < 1 for share in given):
        raise config.fail("activation_sparsity_pattern", f"needs {layers} numbers from 0 to below 1")
    return Streams(count, config.integer("laurel_rank", 64), tuple(map(float, given)))


def read_sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Sizes of layers whose MLPs are not all as wide."""
    widths = config.raw.get("intermediate_size")
    if not isinstance(widths, list):
        return ()
    if len(config.integers("intermediate_size")) != layers or min(widths) < 1:
        raise config.fail("intermediate_size", f"needs {layers} widths")
    if len(set(widths)) == 1:
        return ()
    heads, head_dim = config.integer("num_attention_heads", high=1 << 12), config.integer("head_dim", high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", high=1 << 12)
    return tuple(LayerSizes(heads, kv_heads, head_dim, width) for width in widths)


def gemma3n(config: HfConfig) -> Family:
    """Family of Gemma 3n's decoder."""
    count = config.integer("altup_num_inputs", 4)
    streams = {role: name for role, name in STREAMS.items() if not role[-1].isdigit() or int(role[-1]) < count}
    return Family(
        GEMMA | INPUTS | streams,
        DEFAULTS,
        {"windows": sliding_windows, "sizes": read_sizes, "rope": gemma3_rope, "inputs": per_layer_inputs,
         "streams": read_streams, "embed_scale": embed_scale,
         "output_softcap": lambda c, layers: c.number("final_logit_softcapping", 30.0)},
        (*POST_NORMS, "q_norm", "k_norm", *INPUTS, *streams),
        BIAS_FLAGS, {"join": "own", "attention_scale": 1.0, "normed_values": True},
        (("hidden_act", "hidden_activation"),), rewrites=naked(("altup",), ("correct_output_scale",)),
    )  # fmt: skip


GEMMAS = {"gemma3n_text": gemma3n, "gemma4_text": gemma4, "gemma4_unified_text": gemma4_unified}
"""The rows of Gemma 3n and 4."""
