"""The table of `clip.projector_type`: what files that make rows of images say, as the JSON files of a model's folder.

A field is a constant, or what is read of a file's header and written for a folder. Keys and names are those of
llama.cpp's gguf-py and of its
converters; what no key records is what the family's published folders say. See docs/design/weight-formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.gguf.projector_fields import (
    LAYERS_READ,
    NORM_KIND,
    RATIO,
    SCALE,
    SIDE,
    WHOLE_LAYERS,
    Fields,
    activation,
    bound,
    chosen,
    edges,
    either,
    has,
    key,
    lacks,
    merged,
    merged_rows,
    pairs,
    rows,
    side,
)


@dataclass(frozen=True)
class ProjectorType:
    """How files of one type are read, and written.

    `texts`: `general.architecture` of the file with the decoder -> `model_type` of the whole. `tower`: `model_type` of
    the `vision_config`, of which `vision` has further fields, and `towers` names of parts that are not called as
    elsewhere, by role. `config`, `image`, `text`: fields of config.json,
    preprocessor_config.json and processor_config.json. `names`: of the projector's tensors, by role. `keys`: further
    keys that are read. `interleaved`: rows of queries and keys lie as rope turns them. `skipped`: beginnings of names
    of what has another place here. `stack`: beginning of names of a list of projectors, of which each has the number
    of its layer in the tower. `unfolded`: matrices and vectors (with their ending, if that is no weight) whose numbers
    of a patch lie channel by channel. `swapped`: tensors whose first two axes are swapped. `called`: what some
    converters call parts of layers -> their names. `also`: further types of models, and of towers, whose folders become
    such files. `fused`: queries, keys and values are one matrix. `side`: pixels of a side that files say where folders
    do not. `copies`: tensors that others need, and no reader here -> the token whose embedding each is.
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
    unfolded: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    towers: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    fused: bool = False
    side: int = 0
    copies: Mapping[str, str] = field(default_factory=dict)

    def writes(self, model_type: str, tower: str) -> bool:
        """Whether a folder of these types becomes such a file."""
        return model_type in (*self.texts.values(), *self.also) and tower in (self.tower, *self.also)


SCALE_KEY = f"vision.{SCALE}"
TWO = {"connector_up": "mm.1", "connector_down": "mm.2"}
MERGER = {"connector_norm": "v.post_ln", "connector_up": "mm.0", "connector_down": "mm.2"}
QWEN: Fields = {
    "depth": key("block_count"),
    "num_heads": key("attention.head_count"),
    "spatial_merge_size": merged("spatial_merge_size", 2),
    "temporal_patch_size": 2,
}
QWEN_KEYS = ("vision.spatial_merge_size", "vision.image_min_pixels", "vision.image_max_pixels")


def qwen_image(least: int, most: int) -> Fields:
    """Images in multiples of a merged patch, of `least` to `most` pixels where no key says others."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": side("patch_size"),
        "merge_size": merged("spatial_merge_size", 2),
        "min_pixels": bound("image_min_pixels", least, "min_pixels", "shortest_edge"),
        "max_pixels": bound("image_max_pixels", most, "max_pixels", "longest_edge"),
    }


PATCH, POSITIONS = "v.patch_embd", "v.position_embd.weight"
GEMMA4_IMAGE: Fields = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": side("patch_size"),
    "pooling_kernel_size": key(SCALE, 3),
}
TANH = "gelu_pytorch_tanh"
CLASS, NEWLINE = "v.class_embd", "model.image_newline"
LLAVA_IMAGE: Fields = {
    "image_processor_type": either(NEWLINE, "LlavaNextImageProcessor", "CLIPImageProcessor"),
    "size": edges("shortest_edge", side=SIDE),
    "crop_size": edges("height", "width", side=SIDE),
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
            "vision_feature_layer": LAYERS_READ,
            "vision_feature_select_strategy": either(CLASS, "default", "full"),
            "multimodal_projector_bias": has("mm.0.bias"),
            "image_grid_pinpoints": pairs("image_grid_pinpoints"),
        },
        image=LLAVA_IMAGE,
        keys=("vision.feature_layer", "vision.image_grid_pinpoints", "vision.mm_patch_merge_type"),
        skipped=("v.post_ln.",),
        also=("llava_next", "siglip_vision_model"),
    ),
    "gemma3": ProjectorType(
        {"gemma3": "gemma3"},
        "siglip_vision_model",
        {"connector_norm": "mm.soft_emb_norm", "connector_down": "mm.input_projection"},
        vision={"hidden_act": activation("gelu_pytorch_tanh")},
        config={"mm_tokens_per_image": merged_rows(4)},
        image={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": edges("height", "width", side=SIDE),
        },
        keys=(SCALE_KEY,),
    ),
    "gemma4v": ProjectorType(
        {"gemma4": "gemma4"},
        "gemma4_vision",
        {"connector_down": "mm.input_projection"},
        vision={
            "hidden_activation": activation(TANH, neither=TANH),
            "rms_norm_eps": key("attention.layer_norm_epsilon"),
            "position_embedding_size": rows(POSITIONS),
            "pooling_kernel_size": merged(SCALE, 3),
            "use_clipped_linears": has("v.blk.0.attn_q.input_min"),
            "standardize": has("v.std_bias"),
        },
        image=GEMMA4_IMAGE,
        keys=(SCALE_KEY,),
        side=224,
    ),
    "gemma4uv": ProjectorType(
        {"gemma4": "gemma4_unified"},
        "gemma4_unified_vision",
        {"connector_down": "mm.input_projection"},
        vision={
            "mm_embed_dim": key("embedding_length"),
            "mm_posemb_size": rows(POSITIONS),
            "rms_norm_eps": key("attention.layer_norm_epsilon", 1e-6),
            "pooling_kernel_size": key(SCALE, 3),
            **dict.fromkeys(("num_attention_heads", "intermediate_size"), 1),
        },
        image=GEMMA4_IMAGE,
        keys=(SCALE_KEY,),
        side=224,
        unfolded=(PATCH, "v.patch_norm.1", "v.patch_norm.1.bias"),
        swapped=(POSITIONS,),
        towers={"embed_norm": "v.patch_norm.3"},
    ),
    "llama4": ProjectorType(
        {"llama4": "llama4"},
        "llama4_vision_model",
        {"connector_up": "mm.model.mlp.1", "connector_mid": "mm.model.mlp.2", "connector_down": "mm.model.fc"},
        vision={
            "hidden_act": activation(),
            "pixel_shuffle_ratio": RATIO,
            "projector_input_dim": rows("mm.model.mlp.1.weight"),
            "projector_output_dim": rows("mm.model.mlp.2.weight"),
            "vision_output_dim": rows("mm.model.mlp.2.weight"),
        },
        image={
            "image_processor_type": "Llama4ImageProcessor",
            "size": edges("height", "width", side=SIDE),
        },
        text={"patch_size": side("patch_size"), "pixel_shuffle_ratio": RATIO},
        keys=(SCALE_KEY,),
        unfolded=(PATCH,),
        called={"attn_post_norm": "ln2"},
    ),
    "qwen2vl_merger": ProjectorType(
        {"qwen2vl": "qwen2_vl"},
        "qwen2_vl_vision",
        MERGER,
        vision={**QWEN, "embed_dim": key("embedding_length"), "hidden_act": activation()},
        image=qwen_image(56 * 56, 14 * 14 * 4 * 16384),
        keys=QWEN_KEYS,
        side=560,
    ),
    "qwen2.5vl_merger": ProjectorType(
        {"qwen2vl": "qwen2_5_vl"},
        "qwen2_5_vl_vision",
        MERGER,
        vision={
            **QWEN,
            "hidden_act": activation(),
            "window_size": key("window_size", 112),
            "fullatt_block_indexes": WHOLE_LAYERS,
        },
        image=qwen_image(56 * 56, 14 * 14 * 4 * 16384),
        keys=(*QWEN_KEYS, "vision.n_wa_pattern", "vision.window_size"),
        side=560,
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
        fused=True,
    ),
    "pixtral": ProjectorType(
        {"mistral3": "mistral3", "llama": "mistral3"},
        "pixtral",
        {**TWO, "connector_norm": "mm.input_norm", "connector_merge": "mm.patch_merger"},
        vision={"hidden_act": activation(), "rope_theta": key("rope.freq_base", 10000.0)},
        config={
            "model_type": either("mm.patch_merger.weight", None, "llava"),
            "spatial_merge_size": merged("spatial_merge_size", 1),
            "multimodal_projector_bias": has("mm.1.bias"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        image={
            "image_processor_type": "PixtralImageProcessor",
            "size": edges("longest_edge", side=SIDE),
            "patch_size": side("patch_size"),
        },
        text={
            "processor_class": "PixtralProcessor",
            "patch_size": side("patch_size"),
            "spatial_merge_size": merged("spatial_merge_size", 1),
        },
        keys=("vision.spatial_merge_size", "vision.rope.freq_base"),
        interleaved=True,
        skipped=("v.token_embd.img_break",),
        copies={"v.token_embd.img_break": "[IMG_BREAK]"},
        also=("llava",),
    ),
    "idefics3": ProjectorType(
        {"llama": "idefics3"},
        "idefics3_vision",
        {"connector_down": "mm.model.fc"},
        vision={"hidden_act": activation("gelu_pytorch_tanh")},
        config={"scale_factor": merged(SCALE, 2)},
        image={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": edges("longest_edge", side="preproc_image_size", default=4 * 364),
            "max_image_size": edges("longest_edge", side=SIDE),
        },
        keys=(SCALE_KEY, "vision.preproc_image_size"),
        also=("smolvlm", "smolvlm_vision"),
    ),
    "internvl": ProjectorType(
        dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama", "internlm2", "gpt-oss"), "internvl"),
        "internvl_vision",
        {"connector_norm": "mm.model.mlp.0", "connector_up": "mm.model.mlp.1", "connector_down": "mm.model.mlp.3"},
        vision={
            "hidden_act": activation(),
            "norm_type": NORM_KIND,
            "use_qk_norm": has("v.blk.0.attn_q_norm.weight"),
            "attention_bias": has("v.blk.0.attn_q.bias"),
            "use_absolute_position_embeddings": has("v.position_embd.weight"),
            "use_mean_pooling": lacks("v.post_ln.weight"),
        },
        config={"downsample_ratio": RATIO, "image_seq_length": merged_rows(2)},
        image={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": edges("height", "width", side=SIDE),
            "min_patches": key("preproc_min_tiles", 1),
            "max_patches": key("preproc_max_tiles", 12),
        },
        keys=(SCALE_KEY, "vision.preproc_min_tiles", "vision.preproc_max_tiles"),
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
            "downsample_factor": merged(SCALE, 2),
            "projector_hidden_size": rows("mm.1.weight"),
            "projector_use_layernorm": has("mm.input_norm.weight"),
            "projector_bias": has("mm.1.bias"),
        },
        image={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": side("patch_size"),
            "downsample_factor": merged(SCALE, 2),
        },
        keys=(SCALE_KEY,),
        side=256,
    ),
}
"""By `clip.projector_type`."""
