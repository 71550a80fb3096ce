"""The rows of vision towers: one per model type of a `vision_config`, in terms of a decoder's families.

Names stand behind the beginning that a file's names have, which is found by that of the patch embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import QKV_BIAS, without
from quire.model.families.rope import NO_ROPE, Plain, Rope
from quire.model.families.row import ACTIVATIONS, Family
from quire.model.spec import ModelSpec
from quire.model.tower_sizes import Patches
from quire.model.vision.reading import square

ACTS = ACTIVATIONS | {"quick_gelu": "quick_gelu"}
LINEAR_BIASES = (*QKV_BIAS, "o.bias", "up.bias", "down.bias")
NORM_BIASES = ("attn_norm.bias", "mlp_norm.bias")


@dataclass(frozen=True)
class Tower:
    """One row. `family`: names, required parts and what the config's fields are called, as of a decoder.

    `norm`, `eps`: as of a `ModelSpec`, "named" = `norm_type` says which, None = `layer_norm_eps`; norms of kind "layer"
    have biases. `patches(config)`; `rope`: how heads turn (`_rope`), "" = positions are learned. `full(config)`: layers
    that see all where others see a window.
    """

    family: Family
    patches: Callable[[HfConfig], Patches]
    norm: str = "layer"
    eps: float | None = None
    rope: str = ""
    full: Callable[[HfConfig], tuple[int, ...]] | None = None

    def required(self, config: HfConfig) -> frozenset[str]:
        """The optional roles and biases that a file must have."""
        layer = (_norm(config) if self.norm == "named" else self.norm) == "layer"
        return self.family.required_parts(config) | (frozenset(NORM_BIASES) if layer else frozenset())

    def spec(self, kind: str, config: HfConfig) -> ModelSpec:
        """The tower's shape, all of its layers included; `config` has the family's defaults."""
        layers, hidden = config.integer("num_hidden_layers", high=1024), config.integer("hidden_size", high=1 << 16)
        heads = config.integer("num_attention_heads", high=1 << 10)
        if hidden % heads:
            raise config.fail("hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}")
        if config.integer("num_channels", 3) != 3:
            raise config.fail("num_channels", "is not 3; only images in RGB are supported")
        act = config.text("hidden_act")
        if act not in ACTS:
            raise config.fail("hidden_act", f"{act!r} is not known; known: {', '.join(ACTS)}")
        patches, head_dim = self.patches(config), hidden // heads
        full = range(layers) if self.full is None else self.full(config)
        return ModelSpec(
            family=kind,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            intermediate=config.integer("intermediate_size", high=1 << 18),
            vocab_size=0,
            norm_eps=config.number("layer_norm_eps", 1e-6, high=1.0) if self.eps is None else self.eps,
            activation=ACTS[act],
            rope=(_rope(config, self.rope, head_dim),) * layers,
            windows=tuple(0 if i in full else patches.window**2 for i in range(layers)),
            attention_scale=head_dim**-0.5,
            tied_head=True,
            max_position=patches.grid[0] * patches.grid[1] + patches.first,
            norm=_norm(config) if self.norm == "named" else self.norm,
            patches=patches,
        )


def _norm(config: HfConfig) -> str:
    kinds = {"layer_norm": "layer", "rms_norm": "rms"}
    name = config.text("norm_type", "layer_norm")
    if name not in kinds:
        raise config.fail("norm_type", f"{name!r} is not known; known: {', '.join(kinds)}")
    return kinds[name]


def _rope(config: HfConfig, kind: str, head_dim: int) -> Rope:
    """Frequencies of a head: "axes": half as many as numbers turn, for rows and for columns alike; "turns": as many,
    of which every second one is for columns.
    """
    if not kind:
        return NO_ROPE
    p = config.child("rope_parameters")
    theta = p.number("rope_theta", None) or config.number("rope_theta", 10000.0)
    if head_dim % 4:
        raise config.fail("hidden_size", f"gives heads of {head_dim} numbers, which rows and columns do not divide")
    return Rope(theta, head_dim // 2 if kind == "axes" else head_dim, Plain())


def _learned(positions: str = "same", first: int = 0) -> Callable[[HfConfig], Patches]:
    """A square of learned positions, one for each patch of the size the tower was trained with."""

    def read(config: HfConfig) -> Patches:
        size, whole = square(config, "patch_size", high=256), square(config, "image_size")
        if not whole // size:
            raise config.fail("image_size", f"is {whole}, less than a patch of {size}")
        return Patches(size, grid=(whole // size, whole // size), positions=positions, first=first)

    return read


def _any_shape(config: HfConfig) -> Patches:
    """A square of learned positions that is stretched over images of any shape."""
    count = config.integer("num_patches", high=1 << 20)
    side = int(count**0.5)
    if side * side != count:
        raise config.fail("num_patches", f"is {count}, needs a square")
    return Patches(square(config, "patch_size", high=256), grid=(side, side), positions="antialiased")


def _turning(config: HfConfig) -> Patches:
    return Patches(square(config, "patch_size", high=256))


def _merging(config: HfConfig) -> Patches:
    """Qwen's: a patch spans frames, squares of patches become one row; perhaps windows, perhaps learned positions."""
    size, merge = square(config, "patch_size", high=256), config.integer("spatial_merge_size", 2, high=16)
    count = config.integer("num_position_embeddings", 0, high=1 << 20)
    side = int(count**0.5)
    if side * side != count:
        raise config.fail("num_position_embeddings", f"is {count}, needs a square")
    window = config.integer("window_size", 0, low=0) // merge // size * merge
    if config.has("window_size") and not window:
        raise config.fail("window_size", f"is less than {merge} patches of {size} pixels")
    frames = config.integer("temporal_patch_size", 2, high=16)
    return Patches(size, frames, merge, (side, side), "bilinear", window=window)


def _full(config: HfConfig) -> tuple[int, ...]:
    return config.integers("fullatt_block_indexes")


VIT = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "final_norm": "post_layernorm",
    "layer": "encoder.layers.{}.",
    "attn_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
CLIP = without(VIT, "final_norm") | {"class_token": "embeddings.class_embedding", "embed_norm": "pre_layrnorm"}
PIXTRAL = {
    "patch": "patch_conv",
    "embed_norm": "ln_pre",
    "layer": "transformer.layers.{}.",
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    **{role: f"attention.{role}_proj" for role in "qkvo"},
    **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
}
QWEN2 = {
    "patch": "patch_embed.proj",
    "layer": "blocks.{}.",
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
QWEN2_5 = QWEN2 | {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
QWEN3 = QWEN2 | {"positions": "pos_embed", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
INTERN = {
    "patch": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "final_norm": "layernorm",
    "layer": "encoder.layer.{}.",
    "attn_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "q_row_norm": "attention.q_norm",
    "k_row_norm": "attention.k_norm",
    "o": "attention.projection_layer",
    "attn_scale": "lambda_1",
    "mlp_scale": "lambda_2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "image_size": 224}  # fmt: skip
NAVIT = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
         "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
QWEN_SPELLING = (("num_hidden_layers", "depth"), ("num_attention_heads", "num_heads"), ("num_channels", "in_channels"),
                 ("num_channels", "in_chans"))  # fmt: skip
QWEN_SIZES = {"depth": 32, "num_heads": 16, "patch_size": 14}
SCALES = ("attn_scale", "mlp_scale")
QKV_BIASES = ("qkv.bias", "o.bias")


def _wide(config: HfConfig) -> int:
    return int(config.number("mlp_ratio", 4.0) * config.integer("embed_dim", high=1 << 16))


_SIGLIP = Family(
    VIT,
    SIZES | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"},
    required=("patch", "patch.bias", "positions", *LINEAR_BIASES, "final_norm.bias"),
    skipped=("head.",),
    buffers=(".position_ids",),
)
_NAVIT = Tower(Family(VIT, NAVIT, required=_SIGLIP.required, buffers=_SIGLIP.buffers), _learned("buckets"))
TOWERS: dict[str, Tower] = {
    "clip_vision_model": Tower(
        Family(
            CLIP,
            SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
            required=("patch", "class_token", "positions", "embed_norm", "embed_norm.bias", *LINEAR_BIASES),
            skipped=("post_layernorm.",),
            buffers=(".position_ids",),
        ),
        _learned(first=1),
    ),
    "siglip_vision_model": Tower(_SIGLIP, _learned()),
    "siglip2_vision_model": Tower(replace(_SIGLIP, defaults={**_SIGLIP.defaults, "num_patches": 256}), _any_shape),
    "idefics3_vision": _NAVIT,
    "smolvlm_vision": _NAVIT,
    "pixtral": Tower(
        Family(
            PIXTRAL,
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "patch_size": 16, "hidden_act": "gelu"},
            required=("patch", "embed_norm"),
        ),
        _turning, "rms", 1e-5, "turns",
    ),
    "qwen2_vl_vision": Tower(
        Family(
            QWEN2,
            QWEN_SIZES | {"embed_dim": 1280, "hidden_act": "quick_gelu", "intermediate_size": _wide},
            required=("patch", *QKV_BIASES, "up.bias", "down.bias"),
            spelling=(("hidden_size", "embed_dim"), *QWEN_SPELLING),
        ),
        _merging, "layer", 1e-6, "axes",
    ),
    "qwen2_5_vl_vision": Tower(
        Family(
            QWEN2_5,
            QWEN_SIZES | {"hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu", "window_size": 112,
                          "fullatt_block_indexes": [7, 15, 23, 31]},
            required=("patch", *QKV_BIASES, "gate.bias", "up.bias", "down.bias"),
            spelling=QWEN_SPELLING,
        ),
        _merging, "rms", 1e-6, "axes", _full,
    ),
    "qwen3_vl_vision": Tower(
        Family(
            QWEN3,
            {"depth": 27, "num_heads": 16, "patch_size": 16, "hidden_size": 1152, "intermediate_size": 4304,
             "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304},
            required=("patch", "patch.bias", "positions", *QKV_BIASES, "up.bias", "down.bias"),
            spelling=QWEN_SPELLING,
        ),
        _merging, "layer", 1e-6, "axes",
    ),
    "internvl_vision": Tower(
        Family(
            INTERN,
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "use_absolute_position_embeddings": True},
            required=("patch", "patch.bias", "class_token", "o.bias", "up.bias", "down.bias", *SCALES),
            flags={"attention_bias": QKV_BIAS, "use_qk_norm": ("q_row_norm", "k_row_norm"),
                   "use_absolute_position_embeddings": ("positions",)},
            skipped=("embeddings.mask_token",),
        ),
        _learned("bicubic", first=1), "named",
    ),
}  # fmt: skip
"""By `model_type` of a `vision_config`."""
SAME_TOWER = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "idefics3": "idefics3_vision",
    "smolvlm": "smolvlm_vision",
    "siglip": "siglip_vision_model",
    "clip": "clip_vision_model",
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_vision"), "qwen3_vl_vision"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"), "qwen3_vl_vision"),
}
"""What older files call them, and families whose tower is another's."""


def is_known(name: str) -> bool:
    """Whether there is a row for this `model_type` of a `vision_config`."""
    return SAME_TOWER.get(name, name) in TOWERS


def find_tower(config: HfConfig, usual: str) -> tuple[str, Tower]:
    """The row for the `model_type` of a `vision_config`, `usual` where it has none; `ModelError` naming the known."""
    name = config.text("model_type", usual)
    name = SAME_TOWER.get(name, name)
    if name not in TOWERS:
        raise config.fail("model_type", f"{name!r} is not a tower that is built; built are {', '.join(TOWERS)}")
    return name, TOWERS[name]
