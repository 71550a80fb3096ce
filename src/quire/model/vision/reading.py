"""What a vision part does between its matrices: how pixels become numbers, and which rows of the tower go on, how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ModelError
from quire.images.processor_config import SettingFields
from quire.model.disk.hf_config import HfConfig

Three = tuple[float, float, float]
CLIP_MEAN: Three = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Three = (0.26862954, 0.26130258, 0.27577711)
HALF: Three = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Pixels:
    """A pixel's number is (value * `factor` - `mean`) / `std`, by channel."""

    mean: Three = CLIP_MEAN
    std: Three = CLIP_STD
    factor: float = 1 / 255

    @property
    def centered(self) -> Pixels:
        """2 x - 1 of these numbers."""
        mean = tuple(m + 0.5 * s for m, s in zip(self.mean, self.std, strict=True))
        std = tuple(0.5 * s for s in self.std)
        return Pixels((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), self.factor)


@dataclass(frozen=True)
class Reading:
    """Which rows of a tower become features, and how those of an image's tiles are put together.

    `taps`: the stream behind so many layers, side by side; `normed`: the last of them is what the final norm makes of
    it. `drop`: rows of a tile that are left out at its beginning. `pooled`: the rows of a square of patches are
    averaged instead of put side by side. `deep`: layers behind which further features are taken.
    `packing`: a key of PACKINGS in vision.packing; `tile`: pixels of a tile's side, `pinpoints`: (height, width) that
    an image may be brought to, `most`: tiles whose number of features it may have, for it.
    `scale`: of the features, where the decoder scales embeddings and theirs are not left out. `centered`: the tower
    itself takes numbers between 0 and 1 to those between -1 and 1, beside what the folder says of them.
    """

    pixels: Pixels
    taps: tuple[int, ...]
    normed: bool = False
    drop: int = 0
    pooled: bool = False
    deep: tuple[int, ...] = ()
    packing: str = "tiles"
    tile: int = 0
    pinpoints: tuple[tuple[int, int], ...] = ()
    most: int = 0
    scale: float = 1.0
    centered: bool = False


def read_pixels(said: SettingFields | None, usual: Pixels) -> Pixels:
    """Read pixel scaling from what files say of cutting images, too (`image_settings`).

    `usual`: what they leave out, and all of it where they say nothing, as in a folder without weights.
    """
    if said is None:
        return usual
    config = HfConfig(said.values, said.where)
    factor = config.number("rescale_factor", usual.factor) if config.flag("do_rescale", True) else 1.0
    if not config.flag("do_normalize", True):
        return Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), factor)
    return Pixels(_three(config, "image_mean", usual.mean), _three(config, "image_std", usual.std), factor)


def _three(config: HfConfig, name: str, usual: Three) -> Three:
    value = config.raw.get(name)
    if value is None:
        return usual
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * 3
    good = isinstance(value, list) and len(value) == 3
    if not good or not all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 1e6 for v in value):
        raise config.fail(name, f"is {value!r:.80}, needs three numbers")
    if name == "image_std" and min(value) <= 0:
        raise config.fail(name, f"is {value!r:.80}, needs three numbers above 0")
    return float(value[0]), float(value[1]), float(value[2])


def square(config: HfConfig, name: str, default: Any = ..., high: int = 1 << 14) -> int:
    """A size that may be given as a number or as two equal ones: [s, s], or {"height": s, "width": s}."""
    value = config.raw.get(name)
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, (list, tuple)):
        if len(value) != 2 or value[0] != value[1]:
            raise config.fail(name, f"is {value!r:.80}; only squares are supported")
        return HfConfig({name: value[0]}, config.where).integer(name, high=high)
    return config.integer(name, default, high=high)


def feature_layers(config: HfConfig, layers: int, default: int) -> tuple[int, ...]:
    """`vision_feature_layer`: the hidden states that go on, by number, 0 before the first layer, or from the end."""
    value = config.raw.get("vision_feature_layer", default)
    chosen = value if isinstance(value, list) else [value]
    good = bool(chosen) and all(isinstance(i, int) and not isinstance(i, bool) for i in chosen)
    if not good or not all(-layers - 1 <= i <= layers for i in chosen):
        raise config.fail("vision_feature_layer", f"is {value!r:.80}, needs layers from {-layers - 1} to {layers}")
    return tuple(i if i >= 0 else layers + 1 + i for i in chosen)


def pinpoints(config: HfConfig) -> tuple[tuple[int, int], ...]:
    """`image_grid_pinpoints`: sizes (height, width) in pixels; `ModelError` for anything else."""
    value = config.raw.get("image_grid_pinpoints")
    if not isinstance(value, list) or not all(
        isinstance(p, list) and len(p) == 2 and all(type(n) is int and 0 < n < 1 << 16 for n in p) for p in value
    ):
        raise config.fail("image_grid_pinpoints", "needs a list of [height, width]")
    if not value:
        raise ModelError(f"{config.where}: image_grid_pinpoints: is empty")
    return tuple((p[0], p[1]) for p in value)
