"""What cuts images as a family's tower takes them, by the type that preprocessor_config.json names.

What is made equals transformers' processors of the "pil" kind bit for bit. Numbers stay uint8: rescaling and
normalizing is the tower's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import ModelError
from quire.images.canvases import FittedCanvas
from quire.images.one_tile import Budget, ImageTiles, LongestEdge, Patches, Whole
from quire.images.processor_config import SettingFields, Size
from quire.images.tiles import AnyResolution, Canvas, GridAndWhole, PanAndScan, Split

if TYPE_CHECKING:
    from PIL import Image


class Processor(Protocol):
    """Cuts an RGB image; `alone`: it is the only one of its prompt."""

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles: ...


_NEXT = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
_ONEVISION = [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)]

PROCESSORS: dict[str, Callable[[SettingFields], Processor]] = {
    "CLIPImageProcessor": lambda fields: Whole(fields, Size(shortest=224), crop=224),
    "SiglipImageProcessor": lambda fields: Whole(fields, Size(height=224, width=224)),
    "LlavaImageProcessor": lambda f: Whole(f, Size(shortest=224), crop=224, pad=f.flag("do_pad", False)),
    "LlavaNextImageProcessor": lambda f: AnyResolution(f, Size(shortest=224), 224, _NEXT, squares=False),
    "LlavaOnevisionImageProcessor": lambda f: AnyResolution(
        f, Size(height=384, width=384), 0, _ONEVISION, squares=True
    ),
    "Qwen2VLImageProcessor": Patches,
    "Gemma3ImageProcessor": PanAndScan,
    "Gemma4ImageProcessor": Budget,
    "Gemma4UnifiedImageProcessor": Budget,
    "PixtralImageProcessor": LongestEdge,
    "Idefics3ImageProcessor": Split,
    "SmolVLMImageProcessor": Split,
    "GotOcr2ImageProcessor": Canvas,
    "Lfm2VlImageProcessor": GridAndWhole,
    "Llama4ImageProcessor": FittedCanvas,
}
"""`image_processor_type` of a file, without the endings of its implementations -> what cuts images as it says."""
_ENDINGS = ("Fast", "Pil")
_OLD = {"CLIPFeatureExtractor": "CLIPImageProcessor"}


def make_processor(fields: SettingFields, default: str) -> Processor:
    """What the file says; `default` where it names no type. `ModelError` for one that is not known."""
    name = fields.word("image_processor_type", fields.word("feature_extractor_type", default))
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    name = _OLD.get(name, name)
    if name not in PROCESSORS:
        raise ModelError(f"{fields.where}: image_processor_type {name!r} is not known; known are "
                         f"{', '.join(PROCESSORS)}")  # fmt: skip
    return PROCESSORS[name](fields)
