"""The table of `clip.projector_type`: what files that make rows of images say, as the JSON files of a model's folder.

A field is a constant, or a function of the file's header. Keys and names are those of llama.cpp's gguf-py and of its
converters; what no key records is what the family's published folders say. See docs/design/weight-formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Header(Protocol):
    """What a file says. `infos`: shape of each tensor, slowest axis first."""

    shapes: Mapping[str, tuple[int, ...]]

    def get(self, key: str, default: Any = ...) -> Any:
        """The value of `clip.KEY`; `default` where there is none, an error if that is ... ."""
        ...


Fields = Mapping[str, Any]
"""Field of a JSON file -> its value, or a function of a `Header` that gives it; None leaves the field out."""


def key(name: str, default: Any = ...) -> Callable[[Header], Any]:
    """The value of `clip.vision.NAME`."""
    return lambda header: header.get(f"vision.{name}", default)


def edges(*names: str, side: str, default: Any = ...) -> Callable[[Header], Any]:
    """An object with the same number, that of a key, under each of `names`."""
    return lambda header: dict.fromkeys(names, header.get(f"vision.{side}", default))


def rows(tensor: str) -> Callable[[Header], Any]:
    """How many rows a matrix has."""
    return lambda header: header.shapes[tensor][-2] if tensor in header.shapes else None


def has(tensor: str) -> Callable[[Header], Any]:
    """Whether there is this tensor."""
    return lambda header: tensor in header.shapes


def lacks(tensor: str) -> Callable[[Header], Any]:
    """Whether there is no such tensor."""
    return lambda header: tensor not in header.shapes


def activation(gelu: str = "gelu", neither: str = "quick_gelu") -> Callable[[Header], Any]:
    """The tower's: silu, what `use_gelu` means in the family, or what files mean that say neither."""
    return lambda header: (
        "silu" if header.get("use_silu", False) else gelu if header.get("use_gelu", False) else neither
    )


def width(header: Header) -> Any:
    """Width of the tower's MLP, which the key does not say in all files: the wider side of a matrix."""
    found = header.shapes.get("v.blk.0.ffn_up.weight")
    return header.get("vision.feed_forward_length") if found is None else max(found)


def merged_rows(usual: int) -> Callable[[Header], Any]:
    """Rows of a tile whose patches are joined in squares of `projector.scale_factor`, or `usual`, a side."""

    def count(header: Header) -> Any:
        side = header.get("vision.image_size") // header.get("vision.patch_size")
        return (side // (header.get("vision.projector.scale_factor", usual) or 1)) ** 2

    return count


def ratio(header: Header) -> Any:
    """One over `projector.scale_factor`."""
    return 1 / (header.get("vision.projector.scale_factor", 2) or 1)


def chosen(name: str) -> Callable[[Header], Any]:
    """Places of the layers for which a list says yes."""
    return lambda header: [i for i, on in enumerate(header.get(f"vision.{name}", ())) if on]


def whole_layers(header: Header) -> Any:
    """Layers that see the whole image, each behind `n_wa_pattern` - 1 that see a window."""
    every = header.get("vision.n_wa_pattern")
    return list(range(every - 1, header.get("vision.block_count"), every)) if every else None


def norm_kind(header: Header) -> Any:
    """Norms with biases are layer norms."""
    return "layer_norm" if "v.blk.0.ln1.bias" in header.shapes else "rms_norm"


def pairs(name: str) -> Callable[[Header], Any]:
    """[height, width] of a list in which each width stands before its height."""

    def read(header: Header) -> Any:
        flat = list(header.get(f"vision.{name}", ()))
        return [[high, wide] for wide, high in zip(flat[::2], flat[1::2], strict=False)] or None

    return read


def either(tensor: str, there: Any, gone: Any = None) -> Callable[[Header], Any]:
    """`there` where the file has a tensor, `gone` where not."""
    return lambda header: there if tensor in header.shapes else gone


def layers_read(header: Header) -> Any:
    """The layers whose rows go on; files without a list lack those behind the last that does."""
    return list(header.get("vision.feature_layer", ())) or -1


VISION: Fields = {
    "hidden_size": key("embedding_length"),
    "num_hidden_layers": key("block_count"),
    "num_attention_heads": key("attention.head_count"),
    "intermediate_size": width,
    "image_size": key("image_size"),
    "patch_size": key("patch_size"),
    "layer_norm_eps": key("attention.layer_norm_epsilon"),
}
"""Fields of a `vision_config`."""
IMAGE: Fields = {"image_mean": key("image_mean"), "image_std": key("image_std")}
"""Fields of a preprocessor_config.json."""
READ = frozenset({
    "projector_type", "vision.projector_type", "use_gelu", "use_silu", "vision.image_size", "vision.patch_size",
    "vision.embedding_length", "vision.feed_forward_length", "vision.projection_dim", "vision.block_count",
    "vision.attention.head_count", "vision.attention.layer_norm_epsilon", "vision.image_mean", "vision.image_std",
    "has_vision_encoder", "has_text_encoder", "has_audio_encoder", "has_llava_projector", "has_qwen2vl_merger",
    "vision.mm_projector_type", "vision.image_aspect_ratio", "vision.image_crop_resolution",
    "vision.image_split_resolution",
})  # fmt: skip
"""Keys below "clip." that are read for every type, or change nothing."""


@dataclass(frozen=True)
class ProjectorType:
    """How files of one type are read.

    `texts`: `general.architecture` of the file with the decoder -> `model_type` of the whole. `tower`: `model_type` of
    the `vision_config`, of which `vision` has further fields. `config`, `image`, `text`: fields of config.json,
    preprocessor_config.json and processor_config.json. `names`: of the projector's tensors, by role. `keys`: further
    keys that are read. `interleaved`: rows of queries and keys lie as rope turns them. `skipped`: beginnings of names
    of what has another place here. `stack`: beginning of names of a list of projectors, of which each has the number
    of its layer in the tower.
    """

    texts: Mapping[str, str]
    tower: str
    names: Mapping[str, str]
    vision: Fields = field(default_factory=dict)
    config: Fields = field(default_factory=dict)
    image: Fields = field(default_factory=dict)
    text: Fields = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    interleaved: bool = False
    skipped: tuple[str, ...] = ()
    stack: str = ""


SCALE = "vision.projector.scale_factor"
TWO = {"connector_up": "mm.1", "connector_down": "mm.2"}
MERGER = {"connector_norm": "v.post_ln", "connector_up": "mm.0", "connector_down": "mm.2"}
QWEN: Fields = {
    "depth": key("block_count"),
    "num_heads": key("attention.head_count"),
    "spatial_merge_size": key("spatial_merge_size", 2),
    "temporal_patch_size": 2,
}
QWEN_KEYS = ("vision.spatial_merge_size", "vision.image_min_pixels", "vision.image_max_pixels")


def qwen_image(least: int, most: int) -> Fields:
    """Images in multiples of a merged patch, of `least` to `most` pixels where no key says others."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": key("patch_size"),
        "merge_size": key("spatial_merge_size", 2),
        "min_pixels": key("image_min_pixels", least),
        "max_pixels": key("image_max_pixels", most),
    }


CLASS, NEWLINE = "v.class_embd", "model.image_newline"
LLAVA_IMAGE: Fields = {
    "image_processor_type": either(NEWLINE, "LlavaNextImageProcessor", "CLIPImageProcessor"),
    "size": edges("shortest_edge", side="image_size"),
    "crop_size": edges("height", "width", side="image_size"),
    "image_grid_pinpoints": pairs("image_grid_pinpoints"),
}
PROJECTORS: dict[str, ProjectorType] = {
    "mlp": ProjectorType(
        dict.fromkeys(("llama", "qwen2", "granite", "phi3"), "llava"),
        "clip_vision_model",
        {"connector_up": "mm.0", "connector_down": "mm.2", "newline": NEWLINE},
        vision={
            "model_type": either(CLASS, "clip_vision_model", "siglip_vision_model"),
            "hidden_act": activation("gelu_pytorch_tanh"),
        },
        config={
            "model_type": either(NEWLINE, "llava_next"),
            "vision_feature_layer": layers_read,
            "vision_feature_select_strategy": either(CLASS, "default", "full"),
            "multimodal_projector_bias": has("mm.0.bias"),
            "image_grid_pinpoints": pairs("image_grid_pinpoints"),
        },
        image=LLAVA_IMAGE,
        keys=("vision.feature_layer", "vision.image_grid_pinpoints", "vision.mm_patch_merge_type"),
        skipped=("v.post_ln.",),
    ),
    "gemma3": ProjectorType(
        {"gemma3": "gemma3"},
        "siglip_vision_model",
        {"connector_norm": "mm.soft_emb_norm", "connector_down": "mm.input_projection"},
        vision={"hidden_act": activation("gelu_pytorch_tanh")},
        config={"mm_tokens_per_image": merged_rows(4)},
        image={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": edges("height", "width", side="image_size"),
        },
        keys=(SCALE,),
    ),
    "qwen2vl_merger": ProjectorType(
        {"qwen2vl": "qwen2_vl"},
        "qwen2_vl_vision",
        MERGER,
        vision={**QWEN, "embed_dim": key("embedding_length"), "hidden_act": activation()},
        image=qwen_image(56 * 56, 14 * 14 * 4 * 16384),
        keys=QWEN_KEYS,
    ),
    "qwen2.5vl_merger": ProjectorType(
        {"qwen2vl": "qwen2_5_vl"},
        "qwen2_5_vl_vision",
        MERGER,
        vision={
            **QWEN,
            "hidden_act": activation(),
            "window_size": key("window_size", 112),
            "fullatt_block_indexes": whole_layers,
        },
        image=qwen_image(56 * 56, 14 * 14 * 4 * 16384),
        keys=(*QWEN_KEYS, "vision.n_wa_pattern", "vision.window_size"),
    ),
    "qwen3vl_merger": ProjectorType(
        {"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"},
        "qwen3_vl_vision",
        {**MERGER, "layer": "v.deepstack.{}.", "deep_norm": "norm", "deep_up": "fc1", "deep_down": "fc2"},
        vision={
            **QWEN,
            "hidden_act": activation("gelu_pytorch_tanh"),
            "num_position_embeddings": rows("v.position_embd.weight"),
            "deepstack_visual_indexes": chosen("is_deepstack_layers"),
        },
        image=qwen_image(256 * 256, 4096 * 4096),
        keys=(*QWEN_KEYS, "vision.is_deepstack_layers"),
        stack="v.deepstack.",
    ),
    "pixtral": ProjectorType(
        {"mistral3": "mistral3", "llama": "mistral3"},
        "pixtral",
        {**TWO, "connector_norm": "mm.input_norm", "connector_merge": "mm.patch_merger"},
        vision={"hidden_act": activation(), "rope_theta": key("rope.freq_base", 10000.0)},
        config={
            "model_type": either("mm.patch_merger.weight", None, "llava"),
            "spatial_merge_size": key("spatial_merge_size", 1),
            "multimodal_projector_bias": has("mm.1.bias"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        image={
            "image_processor_type": "PixtralImageProcessor",
            "size": edges("longest_edge", side="image_size"),
            "patch_size": key("patch_size"),
        },
        text={
            "processor_class": "PixtralProcessor",
            "patch_size": key("patch_size"),
            "spatial_merge_size": key("spatial_merge_size", 1),
        },
        keys=("vision.spatial_merge_size", "vision.rope.freq_base"),
        interleaved=True,
        skipped=("v.token_embd.img_break",),
    ),
    "idefics3": ProjectorType(
        {"llama": "idefics3"},
        "idefics3_vision",
        {"connector_down": "mm.model.fc"},
        vision={"hidden_act": activation("gelu_pytorch_tanh")},
        config={"scale_factor": key("projector.scale_factor", 2)},
        image={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": edges("longest_edge", side="preproc_image_size", default=4 * 364),
            "max_image_size": edges("longest_edge", side="image_size"),
        },
        keys=(SCALE, "vision.preproc_image_size"),
    ),
    "internvl": ProjectorType(
        dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama", "internlm2", "gpt-oss"), "internvl"),
        "internvl_vision",
        {"connector_norm": "mm.model.mlp.0", "connector_up": "mm.model.mlp.1", "connector_down": "mm.model.mlp.3"},
        vision={
            "hidden_act": activation(),
            "norm_type": norm_kind,
            "use_qk_norm": has("v.blk.0.attn_q_norm.weight"),
            "attention_bias": has("v.blk.0.attn_q.bias"),
            "use_absolute_position_embeddings": has("v.position_embd.weight"),
            "use_mean_pooling": lacks("v.post_ln.weight"),
        },
        config={"downsample_ratio": ratio, "image_seq_length": merged_rows(2)},
        image={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": edges("height", "width", side="image_size"),
            "min_patches": key("preproc_min_tiles", 1),
            "max_patches": key("preproc_max_tiles", 12),
        },
        keys=(SCALE, "vision.preproc_min_tiles", "vision.preproc_max_tiles"),
    ),
    "lfm2": ProjectorType(
        {"lfm2": "lfm2_vl", "lfm2moe": "lfm2_vl"},
        "siglip2_vision_model",
        {**TWO, "connector_norm": "mm.input_norm"},
        vision={
            "hidden_act": activation("gelu_pytorch_tanh"),
            "num_patches": rows("v.position_embd.weight"),
        },
        config={
            "downsample_factor": key("projector.scale_factor", 2),
            "projector_hidden_size": rows("mm.1.weight"),
            "projector_use_layernorm": has("mm.input_norm.weight"),
            "projector_bias": has("mm.1.bias"),
        },
        image={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": key("patch_size"),
            "downsample_factor": key("projector.scale_factor", 2),
        },
        keys=(SCALE,),
    ),
}
"""By `clip.projector_type`."""
