"""What a row of the table of vision towers is: its fields, and how they are read of a `vision_config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import QKV_BIAS
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
    that see all where others see a window. `unfolded`: columns of the matrix of patches are those of each channel.
    """

    family: Family
    patches: Callable[[HfConfig], Patches]
    norm: str = "layer"
    eps: float | None = None
    rope: str = ""
    full: Callable[[HfConfig], tuple[int, ...]] | None = None
    unfolded: bool = False

    def required(self, config: HfConfig) -> frozenset[str]:
        """The optional roles and biases that a file must have."""
        layer = (_norm(config) if self.norm == "named" else self.norm) == "layer"
        return self.family.required_parts(config) | (frozenset(NORM_BIASES) if layer else frozenset())

    def spec(self, kind: str, config: HfConfig) -> ModelSpec:
        """The tower's shape, all of its layers included; `config` has the family's defaults."""
        layers, hidden = (config.integer("num_hidden_layers", low=0, high=1024),
                          config.integer("hidden_size", high=1 << 16))  # fmt: skip
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
        made = ModelSpec(
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
        return replace(made, **self.family.facts)


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


def learned(positions: str = "same", first: int = 0) -> Callable[[HfConfig], Patches]:
    """A square of learned positions, one for each patch of the size the tower was trained with."""

    def read(config: HfConfig) -> Patches:
        size, whole = square(config, "patch_size", high=256), square(config, "image_size")
        if not whole // size:
            raise config.fail("image_size", f"is {whole}, less than a patch of {size}")
        return Patches(size, grid=(whole // size, whole // size), positions=positions, first=first)

    return read


def any_shape(config: HfConfig) -> Patches:
    """A square of learned positions that is stretched over images of any shape."""
    count = config.integer("num_patches", high=1 << 20)
    side = int(count**0.5)
    if side * side != count:
        raise config.fail("num_patches", f"is {count}, needs a square")
    return Patches(square(config, "patch_size", high=256), grid=(side, side), positions="antialiased")


def turning(config: HfConfig) -> Patches:
    """Read a tower whose heads turn by line and column, and which has no learned positions."""
    return Patches(square(config, "patch_size", high=256))


def merging(config: HfConfig) -> Patches:
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


def full_layers(config: HfConfig) -> tuple[int, ...]:
    """Name layers that see all where others see a window."""
    return config.integers("fullatt_block_indexes")
