"""The rows of projectors: one per model type, from rows of its tower to the decoder's width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.rope import NO_ROPE
from quire.model.families.row import Family
from quire.model.spec import ModelSpec
from quire.model.tower_sizes import Connector
from quire.model.vision.reading import CLIP_MEAN, CLIP_STD, HALF, Pixels, Reading, feature_layers, pinpoints, square
from quire.model.vision.tower_row import ACTS

CLIPS, HALVES, UNSCALED = Pixels(CLIP_MEAN, CLIP_STD), Pixels(HALF, HALF), Pixels((0.0,) * 3, (1.0,) * 3)
SCALED_IN_STREAM = ("granite",)
"""Decoders that scale whatever comes in the place of embeddings; others scale the table of tokens alone."""


@dataclass(frozen=True)
class ProjectorContext:
    """What is known when a projector is read: all of config.json, the tower's part, the specs of tower and decoder."""

    config: HfConfig
    vision: HfConfig
    tower: ModelSpec
    text: ModelSpec


@dataclass(frozen=True)
class Projector:
    """A projector as its row reads it. `turned`: roles whose matrix is [k, n] on disk; `grouped`: those whose columns
    are the numbers of a patch within those of a row, instead of the other way round. `required`: roles and biases.
    """

    spec: ModelSpec
    names: Mapping[str, str]
    required: tuple[str, ...]
    reading: Reading
    turned: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    merge: int = field(default=0)

    @property
    def family(self) -> Family:
        """Names of the projector as of a decoder's family."""
        return Family(self.names, required=self.required)


def _spec(
    seen: ProjectorContext, connector: Connector, norm: str = "layer", eps: float = 1e-5, layers: int = 0
) -> ModelSpec:
    act = seen.config.text("projector_hidden_act", "gelu")
    if act not in ACTS:
        raise seen.config.fail("projector_hidden_act", f"{act!r} is not known; known: {', '.join(ACTS)}")
    return ModelSpec(
        family=f"{seen.config.text('model_type')} projector",
        layers=layers,
        hidden=seen.text.hidden,
        heads=1,
        kv_heads=1,
        head_dim=1,
        intermediate=connector.middle,
        vocab_size=0,
        norm_eps=eps,
        activation=ACTS[act],
        rope=(NO_ROPE,) * layers,
        windows=(0,) * layers,
        attention_scale=1.0,
        tied_head=True,
        max_position=0,
        norm=norm,
        connector=connector,
    )


def _drop(config: HfConfig, usual: str) -> int:
    """Rows that `vision_feature_select_strategy` leaves out: "default" the first, whatever it is."""
    chosen = config.text("vision_feature_select_strategy", usual)
    if chosen not in ("default", "full"):
        raise config.fail("vision_feature_select_strategy", f"{chosen!r} is not known; known: default, full")
    return int(chosen == "default")


TWO = {"connector_up": "multi_modal_projector.linear_1", "connector_down": "multi_modal_projector.linear_2"}
BIASES = ("connector_up.bias", "connector_down.bias")


def _llava(seen: ProjectorContext, layer: int = -2, strategy: str = "default", pixels: Pixels = CLIPS) -> Projector:
    """Two matrices over the rows of one layer of the tower, or of several side by side."""
    taps = feature_layers(seen.config, seen.tower.layers, layer)
    width = seen.tower.hidden * len(taps)
    spec = _spec(seen, Connector(width, read=width, middle=seen.text.hidden))
    biases = BIASES if seen.config.flag("multimodal_projector_bias", True) else ()
    required = ("connector_up", "connector_down", *biases)
    return Projector(spec, TWO, required, Reading(pixels, taps, drop=_drop(seen.config, strategy)))


def _any_size(made: Projector, seen: ProjectorContext, packing: str, most: int = 0) -> Projector:
    """Tiles of an image of any size, a row of numbers at the end of each of its lines (Liu et al. 2024)."""
    reading = replace(
        made.reading,
        packing=packing,
        tile=square(seen.vision, "image_size"),
        pinpoints=pinpoints(seen.config),
        most=most,
    )
    tile, size = reading.tile, seen.tower.patches.size
    if any(height % tile or width % tile for height, width in reading.pinpoints) or tile % size:
        raise seen.config.fail("image_grid_pinpoints", f"has sizes that tiles of {tile} pixels do not make up")
    names = {**made.names, "newline": "image_newline"}
    return replace(made, names=names, required=(*made.required, "newline"), reading=reading)


def _llava_next(seen: ProjectorContext) -> Projector:
    return _any_size(_llava(seen), seen, "lines")


def _llava_onevision(seen: ProjectorContext) -> Projector:
    ratio = seen.config.text("vision_aspect_ratio", "anyres_max_9")
    most = ratio.removeprefix("anyres_max_")
    if not most.isdecimal() or not 0 < int(most) < 1000:
        raise seen.config.fail("vision_aspect_ratio", f"{ratio!r} is not supported; anyres_max_ and a number is")
    return _any_size(_llava(seen, -1, "full"), seen, "lines", int(most))


def _qwen(names: Mapping[str, str], norm: str, pixels: Pixels = CLIPS) -> Callable[[ProjectorContext], Projector]:
    """Rows are normed, then those of a square of patches are read side by side (Wang et al. 2024)."""

    def read(seen: ProjectorContext) -> Projector:
        hidden, merge = seen.tower.hidden, seen.tower.patches.merge
        wide = hidden * merge**2
        deep = seen.vision.integers("deepstack_visual_indexes")
        if list(deep) != sorted(set(deep)) or not all(0 <= i < seen.tower.layers for i in deep):
            raise seen.vision.fail("deepstack_visual_indexes", f"is {list(deep)}, needs ascending numbers of layers")
        connector = Connector(hidden, merge, hidden, wide, wide)
        spec = replace(_spec(seen, connector, norm, 1e-6, len(deep)), activation="gelu")
        roles = [role for role in names if role.startswith("connector_") or (deep and role.startswith("deep_"))]
        biases = [f"{role}.bias" for role in roles if norm == "layer" or not role.endswith("norm")]
        reading = Reading(pixels, (seen.tower.layers,), deep=tuple(i + 1 for i in deep))
        return Projector(spec, names, (*roles, *biases), reading, merge=merge)

    return read


MERGER = {"connector_norm": "visual.merger.ln_q", "connector_up": "visual.merger.mlp.0",
          "connector_down": "visual.merger.mlp.2"}  # fmt: skip
DEEP_MERGERS = {
    "connector_norm": "visual.merger.norm",
    "connector_up": "visual.merger.linear_fc1",
    "connector_down": "visual.merger.linear_fc2",
    "layer": "visual.deepstack_merger_list.{}.",
    "deep_norm": "norm",
    "deep_up": "linear_fc1",
    "deep_down": "linear_fc2",
}


def _gemma3(seen: ProjectorContext) -> Projector:
    """Rows of a square of patches are averaged, normed, and multiplied with one matrix."""
    side, count = seen.tower.patches.grid[0], seen.config.integer("mm_tokens_per_image", 256, high=1 << 16)
    rows = int(count**0.5)
    if not rows or rows * rows != count or side % rows:
        raise seen.config.fail("mm_tokens_per_image", f"is {count}, needs a square that divides {side} x {side}")
    hidden = seen.tower.hidden
    spec = _spec(seen, Connector(hidden, normed=hidden, read=hidden), "rms1p", seen.tower.norm_eps)
    names = {
        "connector_norm": "multi_modal_projector.mm_soft_emb_norm",
        "connector_down": "multi_modal_projector.mm_input_projection_weight",
    }
    reading = Reading(HALVES, (seen.tower.layers,), normed=True, pooled=True)
    return Projector(spec, names, tuple(names), reading, turned=("connector_down",), merge=side // rows)


def _gemma4(seen: ProjectorContext) -> Projector:
    """Rows of a square of patches are averaged, normed without weights, and multiplied with one matrix."""
    hidden = seen.tower.hidden
    spec = _spec(seen, Connector(hidden, normed=hidden, read=hidden), "unit", seen.tower.norm_eps)
    names = {"connector_down": "embed_vision.embedding_projection"}
    reading = Reading(UNSCALED, (seen.tower.layers,), normed=True, pooled=True, centered=True)
    return Projector(spec, names, tuple(names), reading, merge=seen.vision.integer("pooling_kernel_size", 3, high=16))


def _gemma4_unified(seen: ProjectorContext) -> Projector:
    """Rows are normed without weights and multiplied with one matrix."""
    hidden, eps = seen.tower.hidden, seen.vision.number("rms_norm_eps", 1e-6, high=1.0)
    spec = _spec(seen, Connector(hidden, normed=hidden, read=hidden), "unit", eps)
    names = {"connector_down": "embed_vision.embedding_projection"}
    return Projector(spec, names, tuple(names), Reading(UNSCALED, (0,)))


def _mistral3(seen: ProjectorContext) -> Projector:
    """Rows are normed, a matrix joins those of a square of patches, two follow."""
    taps = feature_layers(seen.config, seen.tower.layers, -1)
    if len(taps) > 1:
        raise seen.config.fail("vision_feature_layer", "names several layers; its norm is of the rows of one")
    hidden, merge = seen.tower.hidden, seen.config.integer("spatial_merge_size", 2, high=16)
    spec = _spec(seen, Connector(hidden, merge, hidden, hidden, seen.text.hidden), "rms", seen.text.norm_eps)
    names = TWO | {
        "connector_norm": "multi_modal_projector.norm",
        "connector_merge": "multi_modal_projector.patch_merger.merging_layer",
    }
    biases = BIASES if seen.config.flag("multimodal_projector_bias", False) else ()
    grouped = ("connector_merge",)
    return Projector(spec, names, (*names, *biases), Reading(CLIPS, taps), grouped=grouped, merge=merge)


def _idefics3(seen: ProjectorContext) -> Projector:
    """Rows of a square of patches side by side (pixel shuffle, Shi et al. 2016) are multiplied with one matrix."""
    hidden, merge = seen.tower.hidden, seen.config.integer("scale_factor", 2, high=16)
    spec = _spec(seen, Connector(hidden, merge, read=hidden * merge**2))
    names = {"connector_down": "connector.modality_projection.proj"}
    return Projector(spec, names, tuple(names), Reading(HALVES, (seen.tower.layers,), normed=True), merge=merge)


def _internvl(seen: ProjectorContext) -> Projector:
    """Pixel shuffle, a norm, two matrices."""
    ratio = seen.config.number("downsample_ratio", 0.5, high=1.0)
    hidden, merge = seen.tower.hidden, int(1 / ratio)
    taps = feature_layers(seen.config, seen.tower.layers, -1)
    if len(taps) > 1 or not _drop(seen.config, "default") or 1 / ratio != merge:
        field = "downsample_ratio" if 1 / ratio != merge else "vision_feature_layer"
        raise seen.config.fail(field, "is not supported; one layer, without the class token, and 1 / n are")
    wide = hidden * merge**2
    spec = _spec(seen, Connector(hidden, merge, wide, wide, seen.text.hidden))
    names = TWO | {"connector_norm": "multi_modal_projector.layer_norm"}
    last = taps == (seen.tower.layers,) and seen.config.raw.get("vision_feature_layer", -1) == -1
    normed = last and not seen.vision.flag("use_mean_pooling", True)
    biases = tuple(f"{role}.bias" for role in names)
    return Projector(spec, names, (*names, *biases), Reading(CLIPS, taps, normed, drop=1), merge=merge)


def _lfm2_vl(seen: ProjectorContext) -> Projector:
    """Rows of a square of patches side by side, perhaps a norm, two matrices."""
    hidden, merge = seen.tower.hidden, seen.config.integer("downsample_factor", 2, high=16)
    wide, norms = hidden * merge**2, seen.config.flag("projector_use_layernorm", True)
    middle = seen.config.integer("projector_hidden_size", 2560, high=1 << 18)
    spec = _spec(seen, Connector(hidden, merge, wide if norms else 0, wide, middle))
    names = TWO | ({"connector_norm": "multi_modal_projector.layer_norm"} if norms else {})
    biased = [role for role in names if role == "connector_norm" or seen.config.flag("projector_bias", True)]
    required = (*names, *(f"{role}.bias" for role in biased))
    return Projector(spec, names, required, Reading(HALVES, (seen.tower.layers,), normed=True), merge=merge)


def _llama4(seen: ProjectorContext) -> Projector:
    """Pixel shuffle, two matrices with an activation behind each, one more."""
    ratio = seen.vision.number("pixel_shuffle_ratio", 0.5, high=1.0)
    hidden, merge = seen.tower.hidden, round(1 / ratio)
    wide, middle = hidden * merge**2, seen.vision.integer("projector_input_dim", 4096, high=1 << 18)
    for name, usual, needed in (("intermediate_size", 5632, wide), ("projector_output_dim", 4096, middle),
                                ("vision_output_dim", 7680, middle)):  # fmt: skip
        if seen.vision.integer(name, usual, high=1 << 18) != needed:
            raise seen.vision.fail(name, f"must be {needed}, as the matrices of the projector follow each other")
    spec = _spec(seen, Connector(hidden, merge, read=wide, middle=middle))
    names = {
        "connector_up": "vision_model.vision_adapter.mlp.fc1",
        "connector_mid": "vision_model.vision_adapter.mlp.fc2",
        "connector_down": "multi_modal_projector.linear_1",
    }
    return Projector(spec, names, tuple(names), Reading(HALVES, (seen.tower.layers,), True, drop=1), merge=merge)


PROJECTORS: dict[str, Callable[[ProjectorContext], Projector]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen(MERGER, "layer"),
    "qwen2_5_vl": _qwen(MERGER, "rms"),
    "qwen3_vl": _qwen(DEEP_MERGERS, "layer", HALVES),
    "qwen3_vl_moe": _qwen(DEEP_MERGERS, "layer", HALVES),
    "qwen3_5": _qwen(DEEP_MERGERS, "layer", HALVES),
    "qwen3_5_moe": _qwen(DEEP_MERGERS, "layer", HALVES),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "mistral3": _mistral3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "llama4": _llama4,
}
"""By `model_type`, as the table of models that take images."""


def read_projector(seen: ProjectorContext) -> Projector:
    """The projector of a model type of the table."""
    made = PROJECTORS[seen.config.text("model_type")](seen)
    scale = seen.text.embed_scale if seen.text.family in SCALED_IN_STREAM else 1.0
    return replace(made, reading=replace(made.reading, scale=scale), merge=made.merge or seen.tower.patches.merge)
