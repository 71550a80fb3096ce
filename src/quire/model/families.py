"""The table of model families: a row says what a family's tensors are called and which facts are its own.

A row is (names, defaults, read, required):
- names     role -> on-disk name. `layer` is the prefix of a layer's tensors. On-disk names are the truth.
- defaults  config.json fields that the family's files may omit, with the family's default.
- read      spec field -> function of the config, for facts that are not read the common way (`spec_facts`).
- required  roles ("q_norm") and biases ("q.bias") that must be there although other families lack them, and config
            flags that ask for such ("attention_bias").

Where the axes that no row needs yet will go: another spelling of config fields (n_embd) is one more column; fused
QKV and gate/up on disk are names "qkv" and "gate_up" that `claim` splits into canonical roles by rows, interleaved
rope a row permutation there (`QWeight.take_rows`); norm kind, join (sequential, parallel, post-LN), soft caps,
embedding and logit scale are spec fields set by `read`, which choose the block function in `build`; MoE and MLA are
further parts of the spec with roles of their own in `roles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.model.hf_config import HfConfig
from quire.model.rope import read_rope
from quire.model.spec import ModelSpec

Reader = Callable[[HfConfig, int], Any]

LLAMA = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
QKV_BIAS = ("q.bias", "k.bias", "v.bias")
BIAS_FLAGS = {
    "attention_bias": (*QKV_BIAS, "o.bias"),
    "mlp_bias": ("gate.bias", "up.bias", "down.bias"),
}
QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Family:
    """One row of the table; the module's docstring names the columns."""

    names: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Reader] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def required_parts(self, config: HfConfig) -> frozenset[str]:
        """The optional roles and biases that this checkpoint must have."""
        asked = (parts for flag, parts in self.flags.items() if config.flag(flag, False))
        return frozenset(self.required).union(*asked)


def layer_kinds(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Each layer's attention kind: `layer_types`, or "sliding_attention" from layer `max_window_layers` on."""
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise config.fail("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {layers}")
    known = ("full_attention", "sliding_attention")
    for kind in kinds:
        if kind not in known:
            raise config.fail("layer_types", f"{kind!r} is not known; known: {', '.join(known)}")
    first = config.integer("max_window_layers", 0, low=0)
    return kinds or tuple(known[i >= first] for i in range(layers))


def sliding_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Tokens each layer sees: `sliding_window` on sliding layers unless `use_sliding_window` is false; 0 = all."""
    size = config.integer("sliding_window", 0) if config.flag("use_sliding_window", True) else 0
    if not size and "sliding_attention" in config.texts("layer_types"):
        raise config.fail("layer_types", "has sliding_attention layers but no sliding_window is in use")
    return tuple(size if kind == "sliding_attention" else 0 for kind in layer_kinds(config, layers))


FAMILIES = {
    "llama": Family(LLAMA, flags=BIAS_FLAGS),
    "mistral": Family(
        LLAMA,
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        {"windows": sliding_windows},
    ),
    "qwen2": Family(LLAMA, QWEN, {"windows": sliding_windows}, QKV_BIAS),
    "qwen3": Family(LLAMA, QWEN | {"head_dim": 128}, {"windows": sliding_windows}, ("q_norm", "k_norm"), BIAS_FLAGS),
}


def find_family(config: HfConfig) -> tuple[str, Family]:
    """The row for `model_type`; `ModelError` naming the known ones."""
    name = config.text("model_type")
    if name not in FAMILIES:
        code = " (the code that auto_map points to is never run)" if config.has("auto_map") else ""
        raise config.fail("model_type", f"{name!r} is not supported{code}; supported: {', '.join(sorted(FAMILIES))}")
    return name, FAMILIES[name]


def read_spec(raw: Mapping[str, Any], where: str) -> tuple[ModelSpec, Family, HfConfig]:
    """Spec, family and reader (family defaults filled in) of a config.json's content; `where` names it in errors."""
    name, family = find_family(HfConfig(raw, where))
    config = HfConfig({**family.defaults, **raw}, where)
    facts = spec_facts(config)
    facts |= {field: read(config, facts["layers"]) for field, read in family.read.items()}
    return ModelSpec(family=name, **facts), family, config


def spec_facts(config: HfConfig) -> dict[str, Any]:
    """The spec fields as most families spell them, checked against each other."""
    layers = config.integer("num_hidden_layers", high=1024)
    hidden = config.integer("hidden_size", high=1 << 20)
    heads = config.integer("num_attention_heads", high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", heads, high=1 << 12)
    vocab_size = config.integer("vocab_size", high=1 << 24)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"is {kv_heads}, must divide num_attention_heads {heads}")
    if not config.has("head_dim") and hidden % heads:
        raise config.fail(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    head_dim = config.integer("head_dim", hidden // heads, low=2, high=1 << 12)
    max_position = config.integer("max_position_embeddings", 2048, high=1 << 27)
    act = config.text("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise config.fail("hidden_act", f"{act!r} is not known; known: {', '.join(ACTIVATIONS)}")
    bos = config.token_ids("bos_token_id", vocab_size)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": config.integer("intermediate_size", high=1 << 24),
        "vocab_size": vocab_size,
        "norm_eps": config.number("rms_norm_eps", 1e-6, high=1.0),
        "activation": ACTIVATIONS[act],
        "rope": tuple(read_rope(config, head_dim, max_position, kind) for kind in layer_kinds(config, layers)),
        "windows": (0,) * layers,
        "attention_scale": head_dim**-0.5,
        "tied_head": config.flag("tie_word_embeddings", False),
        "max_position": max_position,
        "eos_token_ids": config.token_ids("eos_token_id", vocab_size),
        "bos_token_id": bos[0] if bos else None,
    }
