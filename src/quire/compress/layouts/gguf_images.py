"""Files of what makes rows of images (mmproj-*.gguf), of model folders: the inverse of `quire.model.vision.mmproj`, by
the same tables.

A file is read back beside that of its decoder. One of which a tower, a projector or the way in which images are cut
would be others than the folder's is not kept, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from quire.compress.layouts.gguf_facts import same
from quire.core.errors import ConfigError, ModelError
from quire.gguf.encode import encode
from quire.gguf.file import CLIP
from quire.gguf.mmproj import KIND, Mmproj
from quire.gguf.projector_fields import IMAGE, VISION, FolderSettings, written
from quire.gguf.projector_types import PROJECTORS, ProjectorType
from quire.gguf.writer import NewTensor, write_file
from quire.images.processor_config import Settings, image_settings, read_settings
from quire.images.prompt_layouts import make_layout
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.headers import ModelHeaders, VisionHeaders
from quire.model.disk.hf_config import read_json
from quire.model.families.multimodal import MULTIMODAL
from quire.model.load.roles import DISK_ROLES, FUSED
from quire.model.tower_roles import BOUNDED, BOUNDS
from quire.model.vision.mmproj import NAMES, open_mmproj, settings_of
from quire.model.vision.reading import read_pixels
from quire.model.vision.vision_headers import VisionSaid
from quire.ops.arrays import as_f32, to_numpy
from quire.text.tokenizer import Tokenizer

Floats = np.ndarray[Any, Any]
NAKED = ("class_token", "newline", "std_bias", "std_scale",
         *(f"{role}_{bound}" for role in BOUNDED for bound in BOUNDS))  # fmt: skip
"""Roles whose one tensor has the name of the role alone."""
TYPES = {"F32": 0, "F16": 1, "BF16": 32}
"""Format of matrices -> number of `general.file_type`."""
USUAL = "F16"
"""Format of matrices where that of the decoder has fewer bits."""
FRAMES = ("", ".1")
"""Endings of the names of a patch's kernels, one for each frame."""
UNTOLD = ("family", "norm", "interleaved_rope")
"""Facts of towers and projectors that tensors say, or that differ where files hold norms whole."""


@dataclass(frozen=True)
class Images:
    """What a folder has for images. `name`: the type of its file, by `row`; `raw`: config.json."""

    opened: ModelHeaders
    vision: VisionHeaders
    said: VisionSaid
    raw: Mapping[str, Any]
    name: str
    row: ProjectorType

    @classmethod
    def of(cls, opened: ModelHeaders) -> Images | None:
        """What makes rows of images for the model, None where nothing does; `ConfigError` where no type of file is for
        it, or its folder does not say how images are cut."""
        if opened.vision is None:
            return None
        path = opened.folder / "config.json"
        raw, image = read_json(path), image_settings(opened.folder)
        said = VisionSaid.read(raw, str(path), MULTIMODAL[raw["model_type"]].tower, opened.spec, image)
        kind = said.whole.family
        found = next((each for each in PROJECTORS.items() if each[1].writes(raw["model_type"], kind)), None)
        if found is None:
            raise ConfigError(f"no type of mmproj file is for {raw['model_type']!r} with {kind}")
        if image is None:
            raise ConfigError("the folder does not say how images are cut (preprocessor_config.json)")
        return cls(opened, opened.vision, said, raw, *found)

    def becomes(self, model_type: str) -> bool:
        """Whether a folder of this type of model is what the file is read as."""
        own = self.raw["model_type"]
        return model_type == own or own not in self.row.texts.values()

    def metadata(self, name: str, kind: str) -> dict[str, Any]:
        """The metadata of the file, whose matrices are in the format `kind`, of a model called `name`."""
        keys = {
            "projector_type": self.name,
            "has_vision_encoder": True,
            "vision.projection_dim": self.opened.spec.hidden,
        }
        found: dict[str, Any] = {"general.architecture": CLIP, "general.type": KIND, "general.name": name}
        found |= {"general.file_type": TYPES[kind], "general.quantization_version": 2}
        told, row = self._told(), self.row
        keys |= written({**IMAGE, **row.image}, told.image, told) | written(row.config, told.config, told)
        keys |= written(VISION, told.vision, told) | written(row.vision, told.vision, told)
        return found | {f"{CLIP}.{key}": _typed(value) for key, value in keys.items()}

    def _told(self) -> FolderSettings:
        """What the folder says, its usual values included."""
        spec, said = self.vision.tower.spec, self.said
        image = image_settings(self.opened.folder)
        pixels = read_pixels(image, said.projector.reading.pixels)
        given, patches = said.inner.raw, spec.patches
        side = (self.raw.get("vision_config") or {}).get("image_size") or self.row.side or given.get("image_size")
        vision = {
            **{key: value for key, value in given.items() if value is not None},
            "image_size": side or patches.grid[0] * patches.size,
            "hidden_size": spec.hidden,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "intermediate_size": spec.intermediate,
            "layer_norm_eps": spec.norm_eps,
            "depth": spec.layers,
        }
        vision |= {"rope_theta": float(spec.rope[0].theta)} if spec.layers and spec.rope[0].dim else {}
        means = {"image_mean": list(pixels.mean), "image_std": list(pixels.std)}
        cut = {} if image is None else image.values
        return FolderSettings(vision, self.raw, {**cut, **means}, patches.merge, self.vision.reading.taps)

    def tensors(self) -> Iterator[tuple[str, str, str, Floats]]:
        """Name, role and part of each tensor of the file, and its numbers, f32."""
        tower, row = {**NAMES, **self.row.towers}, self.row
        deep = self.said.inner.integers("deepstack_visual_indexes")
        for part, names in ((self.vision.tower, tower), (self.vision.projector, row.names)):
            for (role, place), found in part.claim.parts.items():
                layer = deep[place.layer] if part is self.vision.projector and place.layer is not None else place.layer
                start = "" if layer is None else names["layer"].format(layer)
                for ending, name in found.items():
                    values = to_numpy(as_f32(part.source.tensor(name)))
                    for one, numbers in self._split(role, values, row.fused):
                        base = start + names[one]
                        called = base if one in NAKED else f"{base}.{ending}"
                        yield from self._as_written(called, one, ending, numbers)
            part.source.give_back()
        yield from self._copies()

    def _copies(self) -> Iterator[tuple[str, str, str, Floats]]:
        """Rows of the decoder's table of tokens, as far as its vocabulary has them."""
        parts, copies = self.opened.claim.get("embed"), self.row.copies
        known = Tokenizer.from_folder(self.opened.folder) if copies else None
        for name, token in copies.items():
            row = None if known is None else known.token_to_id(token)
            if row is not None and "weight" in parts:
                yield name, "newline", "weight", to_numpy(as_f32(self.opened.source.tensor(parts["weight"])[row]))

    @staticmethod
    def _split(role: str, values: Floats, fused: bool) -> list[tuple[str, Floats]]:
        if role != "qkv" or fused:
            return [(role, values)]
        return [*zip(FUSED["qkv"], np.split(values, 3), strict=True)]

    def _as_written(self, name: str, role: str, part: str, values: Floats) -> Iterator[tuple[str, str, str, Floats]]:
        """The tensors of one of ours, as files have them."""
        spec, projector, row = self.vision.tower.spec, self.said.projector, self.row
        if role in projector.turned and part == "weight":
            values = values.T
        elif role in projector.grouped and part == "weight":
            values = values.reshape(len(values), -1, projector.spec.connector.width).swapaxes(1, 2)
            values = values.reshape(len(values), -1)
        elif projector.spec.norm.endswith("1p") and role == "connector_norm":
            values = values + 1
        elif row.interleaved and role in ("q", "k"):
            halves = values.reshape(spec.heads, 2, spec.head_dim // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        elif name.removesuffix(".weight") in row.unfolded:
            values = values.reshape(*values.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(values.shape)
        elif role == "patch" and part == "weight":
            size, frames = spec.patches.size, spec.patches.frames
            kernels = values.reshape(len(values), frames, size, size, 3).transpose(1, 0, 4, 2, 3)
            yield from ((name + FRAMES[i], role, part, kernel) for i, kernel in enumerate(kernels))
            return
        elif role == "positions" and 2 in spec.patches.grid and spec.patches.positions in TWO_TABLES:
            values = values.reshape(*spec.patches.grid, spec.hidden)
            values = values.swapaxes(0, 1) if name in row.swapped else values
        yield name, role, part, values

    def differs(self, path: Path, text: Path) -> str:
        """Name what the file `path`, beside that of the decoder `text`, says otherwise than the folder; "": nothing."""
        found, decoder = Mmproj.open(path), GgufModel.open(text)
        read, sight = open_mmproj(found, decoder, decoder.read_spec()[0])
        for what in ("tower", "projector"):
            ours, theirs = getattr(self.vision, what).spec, getattr(read, what).spec
            for each in fields(ours):
                if each.name not in UNTOLD and not same(getattr(ours, each.name), getattr(theirs, each.name)):
                    return f"{each.name} of the {what}"
        for what, one, other in (
            ("what images change in the decoder", self.opened.spec.sight, sight),
            ("how the tower is read", self.vision.reading, read.reading),
            ("how images are cut", _cut(read_settings(self.opened.folder)), _cut(settings_of(found, decoder.file))),
        ):
            if not same(one, other):
                return what
        return ""


TWO_TABLES = ("summed", "paired")
"""Positions that are sums of a row of each of two tables."""


def _cut(settings: Settings | None) -> Any:
    """How images are cut and written into prompts, as numbers and words that can be compared."""
    return None if settings is None else _plain(make_layout(settings))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in value)
    if is_dataclass(value) or not type(value).__module__.startswith("quire."):
        return value
    kept = {k: _plain(v) for k, v in vars(value).items() if not isinstance(v, (FunctionType, MethodType))}
    return (type(value).__name__, *sorted(kept.items()))


def _typed(value: Any) -> Any:
    """A value as a type of GGUF; lists as arrays."""
    if not isinstance(value, (list, tuple)):
        return value
    kinds = {type(each) for each in value}
    return np.array(value, bool if kinds <= {bool} else np.int32 if kinds <= {int, bool} else np.float32)


def _format(role: str, part: str, kind: str) -> str:
    """The format of a tensor where matrices have `kind`."""
    return kind if DISK_ROLES[role].kind == "linear" and part == "weight" and role != "patch" else "F32"


def _encoded(images: Images, kind: str) -> Iterator[Floats]:
    """The bytes of each tensor."""
    for _, role, part, values in images.tensors():
        yield encode(np.ascontiguousarray(values).reshape(-1, values.shape[-1]), _format(role, part, kind))


def images_file(path: Path, kind: str) -> tuple[Path, str]:
    """The file beside that of the decoder, `path`, whose matrices have the format `kind`, and the format of its own."""
    own = kind if kind in TYPES else USUAL
    return path.with_name(f"{KIND}-{path.stem.removesuffix(f'-{kind}')}-{own}.gguf"), own


def decoders_of(opened: ModelHeaders) -> tuple[str, ...]:
    """Architectures of files with the decoder to which the file for its images may belong."""
    try:
        images = Images.of(opened)
    except (ConfigError, ModelError):
        return ()
    return () if images is None else tuple(name for name, kind in images.row.texts.items() if images.becomes(kind))


def write_images(opened: ModelHeaders, path: Path, text: Path, name: str, kind: str) -> str:
    """Write what makes rows of images for the model of a folder as the file `path`, beside its decoder's, `text`.

    `name`: what the file calls the model. `kind`: format of the matrices, F32, F16 or BF16. Returns why there is no
    file; "" where there is one, or the model takes no images.
    """
    try:
        images = Images.of(opened)
    except (ConfigError, ModelError) as error:
        return error.message
    if images is None:
        return ""
    made = ((called, _format(role, part, kind), values) for called, role, part, values in images.tensors())
    tensors = [NewTensor(called, form, values.shape) for called, form, values in made]
    write_file(path, images.metadata(name, kind), tensors, _encoded(images, kind))
    try:
        wrong = images.differs(path, text)
        why = f"no key of mmproj files says {wrong} as the folder does" if wrong else ""
    except ModelError as error:
        why = error.message
    if why:
        path.unlink()
    return why
