"""Fields of JSON files as files that make rows of images say them: constants, and functions of a file's header.

Keys are those of llama.cpp's gguf-py. `projector_types` has the table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
