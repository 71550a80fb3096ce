"""Fields of JSON files as files that make rows of images say them, both ways: constants, or what is read of a file's
header and written for a folder.

Keys are those of llama.cpp's gguf-py. `projector_types` has the table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Header(Protocol):
    """What a file says."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, slowest axis first."""
        ...

    def get(self, key: str, default: Any = ...) -> Any:
        """The value of `clip.KEY`; `default` where there is none, an error if that is ... ."""
        ...


@dataclass(frozen=True)
class FolderSettings:
    """What a folder says, with usual values: the inverse of a `Header`.

    `vision`, `config`, `image`: the `vision_config`, all of config.json, and preprocessor_config.json. `merge`: patches
    of a side that become one row. `taps`: the stream of the tower behind so many layers goes on.
    """

    vision: Mapping[str, Any]
    config: Mapping[str, Any]
    image: Mapping[str, Any]
    merge: int
    taps: tuple[int, ...]


def _nothing(value: Any, said: FolderSettings) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Field:
    """`read(header)`: the value of a field by a file; None leaves it out. `write(value, said)`: values of keys below
    "clip." for the `value` that a folder has, None if it has none. Where tensors say it, nothing is written."""

    read: Callable[[Header], Any]
    write: Callable[[Any, FolderSettings], Mapping[str, Any]] = _nothing


Fields = Mapping[str, Any]
"""Field of a JSON file -> its value, or a `Field`."""


def key(name: str, default: Any = ...) -> Field:
    """The value of `clip.vision.NAME`."""
    name = f"vision.{name}"
    return Field(lambda header: header.get(name, default), lambda value, said: {} if value is None else {name: value})


def side(name: str) -> Field:
    """A number of pixels of a square's side, which folders may say twice."""
    own = key(name)

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        found = [*value.values()] if isinstance(value, Mapping) else value
        return own.write(found[0] if isinstance(found, (list, tuple)) else found, said)

    return Field(own.read, write)


def merged(name: str, default: int) -> Field:
    """How many patches of a side become one row."""
    return Field(key(name, default).read, lambda value, said: {f"vision.{name}": said.merge})


def edges(*names: str, side: str, default: Any = ...) -> Field:
    """An object with the same number, that of a key, under each of `names`."""
    own = key(side, default)

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        return {} if side == SIDE or not isinstance(value, Mapping) else own.write(value.get(names[0]), said)

    return Field(lambda header: dict.fromkeys(names, own.read(header)), write)


SIDE = "image_size"
"""The key of an image's side, which the tower's field says."""


def bound(name: str, default: int, own: str, edge: str) -> Field:
    """Pixels of an image, which folders say as `own`, or as `own` or `edge` within "size"."""

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        size = said.image.get("size") or {}
        found = next((v for v in (value, size.get(own), size.get(edge)) if v is not None), None)
        return key(name).write(found, said)

    return Field(key(name, default).read, write)


def rows(tensor: str) -> Field:
    """How many rows a matrix has."""
    return Field(lambda header: header.shapes[tensor][-2] if tensor in header.shapes else None)


def has(tensor: str) -> Field:
    """Whether there is this tensor."""
    return Field(lambda header: tensor in header.shapes)


def lacks(tensor: str) -> Field:
    """Whether there is no such tensor."""
    return Field(lambda header: tensor not in header.shapes)


def either(tensor: str, there: Any, gone: Any = None) -> Field:
    """`there` where the file has a tensor, `gone` where not."""
    return Field(lambda header: there if tensor in header.shapes else gone)


def activation(gelu: str = "gelu", neither: str = "quick_gelu") -> Field:
    """The tower's: silu, what `use_gelu` means in the family, or what files mean that say neither."""

    def read(header: Header) -> Any:
        return "silu" if header.get("use_silu", False) else gelu if header.get("use_gelu", False) else neither

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        return {"use_silu": True} if value == "silu" else {"use_gelu": True} if value == gelu else {}

    return Field(read, write)


def _width(header: Header) -> Any:
    """Width of the tower's MLP, which the key does not say in all files: the wider side of a matrix."""
    found = header.shapes.get("v.blk.0.ffn_up.weight")
    return header.get("vision.feed_forward_length") if found is None else max(found)


def merged_rows(usual: int) -> Field:
    """Rows of a tile whose patches are joined in squares of `projector.scale_factor`, or `usual`, a side."""

    def count(header: Header) -> Any:
        side = header.get("vision.image_size") // header.get("vision.patch_size")
        return (side // (header.get(f"vision.{SCALE}", usual) or 1)) ** 2

    return Field(count, merged(SCALE, usual).write)


SCALE = "projector.scale_factor"
RATIO = Field(lambda header: 1 / (header.get(f"vision.{SCALE}", 2) or 1), merged(SCALE, 2).write)
"""One over `projector.scale_factor`."""


def chosen(name: str) -> Field:
    """Places of the layers for which a list says yes."""

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        return {f"vision.{name}": [i in (value or ()) for i in range(said.vision["num_hidden_layers"])]}

    return Field(lambda header: [i for i, on in enumerate(header.get(f"vision.{name}", ())) if on], write)


def _whole_layers(header: Header) -> Any:
    every = header.get("vision.n_wa_pattern")
    return list(range(every - 1, header.get("vision.block_count"), every)) if every else None


WHOLE_LAYERS = Field(_whole_layers, lambda value, said: {"vision.n_wa_pattern": value[0] + 1} if value else {})
"""Layers that see the whole image, each behind `n_wa_pattern` - 1 that see a window."""
NORM_KIND = Field(lambda header: "layer_norm" if "v.blk.0.ln1.bias" in header.shapes else "rms_norm")
"""Norms with biases are layer norms."""


def pairs(name: str) -> Field:
    """[height, width] of a list in which each width stands before its height: sizes of images whose padding goes."""

    def read(header: Header) -> Any:
        flat = list(header.get(f"vision.{name}", ()))
        return [[high, wide] for wide, high in zip(flat[::2], flat[1::2], strict=False)] or None

    def write(value: Any, said: FolderSettings) -> Mapping[str, Any]:
        flat = [side for high, wide in value or () for side in (wide, high)]
        return {f"vision.{name}": flat, "vision.mm_patch_merge_type": "spatial_unpad"} if flat else {}

    return Field(read, write)


LAYERS_READ = Field(
    lambda header: list(header.get("vision.feature_layer", ())) or -1,
    lambda value, said: {"vision.feature_layer": [*said.taps]},
)
"""The layers whose rows go on; files without a list lack those behind the last that does."""
VISION: Fields = {
    "hidden_size": key("embedding_length"),
    "num_hidden_layers": key("block_count"),
    "num_attention_heads": key("attention.head_count"),
    "intermediate_size": Field(_width, key("feed_forward_length").write),
    SIDE: side(SIDE),
    "patch_size": side("patch_size"),
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


def written(fields: Fields, values: Mapping[str, Any], said: FolderSettings) -> dict[str, Any]:
    """Values of keys below "clip." that files have for the `values` of fields."""
    found = dict[str, Any]()
    for name, how in fields.items():
        found |= how.write(values.get(name), said) if isinstance(how, Field) else {}
    return found
