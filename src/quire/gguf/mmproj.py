"""Files of what makes rows of images for a model of text (mmproj-*.gguf): their metadata as the JSON files of a folder.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.gguf.file import CLIP, GgufFile, is_gguf, kind_of
from quire.gguf.projector_fields import IMAGE, READ, VISION, Field, Fields
from quire.gguf.projector_types import PROJECTORS, ProjectorType

KIND = "mmproj"
"""What `kind_of` calls such a file."""


@dataclass(frozen=True)
class Mmproj:
    """A file whose header was read. `name`: its `clip.projector_type`."""

    file: GgufFile
    name: str
    row: ProjectorType

    @classmethod
    def open(cls, path: Path) -> Mmproj:
        """Read the header; `ModelError` for a file, a type or a key that cannot be read."""
        if not is_gguf(path):
            why = "is no GGUF file" if path.exists() else "is missing"
            raise ModelError(f"{path}: {why}; --mmproj needs the file mmproj-*.gguf of the model")
        file = GgufFile(path)
        name = file.metadata.get("general.architecture")
        if name != CLIP:
            raise file.fail("general.architecture", f"is {name!r:.40}, a mmproj file has {CLIP!r}")
        name = file.metadata.get(f"{CLIP}.projector_type") or file.metadata.get(f"{CLIP}.vision.projector_type")
        if not isinstance(name, str) or name not in PROJECTORS:
            built = ", ".join(sorted(PROJECTORS))
            raise file.fail(f"{CLIP}.projector_type", f"{name!r:.40} is not supported; supported: {built}")
        found = cls(file, name, PROJECTORS[name])
        for key in file.metadata:
            below = key.removeprefix(f"{CLIP}.")
            if below != key and below not in READ and below not in found.row.keys and not below.startswith("audio."):
                raise file.fail(key, "is not known: the tower may have a feature that is not supported")
        return found

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, slowest axis first."""
        return {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def get(self, key: str, default: Any = ...) -> Any:
        """The value of `clip.KEY`, with the fewest digits that mean the number; `ModelError` where it must be there."""
        value = self.file.metadata.get(f"{CLIP}.{key}")
        if value is None:
            if default is ...:
                raise self.file.fail(f"{CLIP}.{key}", "is missing; convert the model again")
            return default
        if isinstance(value, np.ndarray):
            return [_shortest(number) for number in value.tolist()]
        return _shortest(value)

    @property
    def said(self) -> str:
        """The file, as messages name it: with the name of the model that it was made of."""
        name = self.file.metadata.get("general.name")
        return f"{self.file.path.name} ({self.name}{f', of {name}' if isinstance(name, str) else ''})"

    def config(self, architecture: str, other: str) -> dict[str, Any]:
        """The config.json of the whole, less its `text_config`: the decoder's file `other` says `architecture`.

        `ModelError` where files of this type do not belong to such a decoder.
        """
        if architecture not in self.row.texts:
            models = ", ".join(self.row.texts)
            raise ModelError(
                f"{self.file.path}: {CLIP}.projector_type: {self.said} belongs to a model of {models}, and {other} is "
                f"one of {architecture}; give the mmproj file of the same model, or "
                "--language-model-only"
            )
        vision = {"model_type": self.row.tower} | self._of(VISION) | self._of(self.row.vision)
        return {"model_type": self.row.texts[architecture]} | self._of(self.row.config) | {"vision_config": vision}

    @property
    def image(self) -> dict[str, Any]:
        """The preprocessor_config.json."""
        return self._of(IMAGE) | self._of(self.row.image)

    @property
    def text(self) -> dict[str, Any]:
        """The processor_config.json."""
        return self._of(self.row.text)

    def _of(self, fields: Fields) -> dict[str, Any]:
        found = {name: how.read(self) if isinstance(how, Field) else how for name, how in fields.items()}
        return {name: value for name, value in found.items() if value is not None}


def _shortest(value: Any) -> Any:
    """A float of 32 bits as the number of fewest digits that rounds to it, as the converter read it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def mmproj_beside(path: Path) -> list[Path]:
    """The mmproj files in the folder of a GGUF file, by name."""
    found = sorted(each for each in path.parent.glob("*mmproj*.gguf") if is_gguf(each))
    return [each for each in found if kind_of(each) == KIND]
