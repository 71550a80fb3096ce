"""What a model folder says of images: preprocessor_config.json, processor_config.json, and its tokens by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.files import read_json

MOST_SIDE = 1 << 14
"""Pixels of a side that a file may ask for."""
MOST_PIXELS = 1 << 26
"""Pixels of an image that a file may ask for."""


@dataclass(frozen=True)
class Size:
    """How large an image becomes: `height` x `width` exactly; or its `shortest` edge, the other following, unless the
    `longest` would be exceeded; or within `max_height` x `max_width`. 0 = not given. In pixels."""

    height: int = 0
    width: int = 0
    shortest: int = 0
    longest: int = 0
    max_height: int = 0
    max_width: int = 0


_EDGES = {"height": "height", "width": "width", "shortest_edge": "shortest", "longest_edge": "longest",
          "max_height": "max_height", "max_width": "max_width"}  # fmt: skip


class SettingFields:
    """Values of a JSON object by type; null counts as not given. `ModelError` names the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, name: str, default: int, least: int = 0, most: int = MOST_SIDE) -> int:
        """An integer in [least, most]."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self.wrong(name, f"must be an integer, not {value!r}")
        if not least <= value <= most:
            raise self.wrong(name, f"is {value}, outside [{least}, {most}]")
        return int(value)

    def real(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name)
        if not isinstance(value, (bool, type(None))):
            raise self.wrong(name, f"must be true or false, not {value!r}")
        return default if value is None else value

    def word(self, name: str, default: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, (str, type(None))):
            raise self.wrong(name, f"must be a string, not {value!r}")
        return default if value is None else value

    def inner(self, name: str) -> SettingFields:
        """An object within this one; empty where it is not given."""
        value = self.get(name)
        if not isinstance(value, (Mapping, type(None))):
            raise self.wrong(name, f"must be an object, not {value!r}")
        return SettingFields(value or {}, f"{self.where}.{name}")

    def size(self, name: str, default: Size, square: bool) -> Size:
        """A size: an object of edges, [height, width], or a number: that of both (`square`) or of the shorter side."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        elif not isinstance(value, Mapping):
            value = {"height": value, "width": value} if square else {"shortest_edge": value}
        if not value or value.keys() - _EDGES.keys():
            raise self.wrong(name, f"is {value!r}, not a size by {', '.join(_EDGES)}")
        given = SettingFields(value, f"{self.where}.{name}")
        return Size(**{ours: given.number(theirs, 0, 1) for theirs, ours in _EDGES.items()})

    def get(self, name: str) -> Any:
        """The value as it stands; None where it is not given."""
        return self.values.get(name)

    def wrong(self, name: str, reason: str) -> ModelError:
        """The error that says what is wrong with a field."""
        return ModelError(f"{self.where}: {name} {reason}")


@dataclass(frozen=True)
class Settings:
    """`image`: of the processor of images, `text`: of what writes them into prompts, `config`: of the model.

    `tokens`: role in tokenizer_config.json ("image_token", ...) -> the token.
    """

    image: SettingFields
    text: SettingFields
    config: SettingFields
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vision(self) -> SettingFields:
        """Settings of the model's tower."""
        return self.config.inner("vision_config")

    @property
    def processor_class(self) -> str:
        """What the files call the class that writes images into prompts; "" where they do not."""
        return self.text.word("processor_class", "") or self.image.word("processor_class", "")

    def with_image(self, **values: Any) -> SettingFields:
        """Settings of the processor of images, with `values` in place of what the file says."""
        return SettingFields({**self.image.values, **values}, self.image.where)

    def token(self, role: str, default: str) -> str:
        """The token of a role, by the tokenizer's files."""
        return self.tokens.get(role, default)


def image_settings(folder: Path) -> SettingFields | None:
    """What the folder says of cutting images and of their numbers; None where it says nothing.

    `image_processor` of processor_config.json, where that has one, and preprocessor_config.json else: the order in
    which transformers' own loader looks (`ImageProcessingMixin.get_image_processor_dict`).
    """
    path = folder / "processor_config.json"
    inner, where = read_json(path).get("image_processor"), f"{path}: image_processor"
    if inner is None:
        path = folder / "preprocessor_config.json"
        inner, where = read_json(path), str(path)
    if not isinstance(inner, dict):
        raise ModelError(f"{where} must be an object, not {inner!r:.80}")
    return SettingFields(inner, where) if inner else None


def read_settings(folder: Path) -> Settings | None:
    """What the folder says; None where it does not say how images are cut (`image_settings`)."""
    image = image_settings(folder)
    if image is None:
        return None
    config_path, text_path = folder / "config.json", folder / "processor_config.json"
    return Settings(
        image, SettingFields(read_json(text_path), str(text_path)), SettingFields(read_json(config_path),
        str(config_path)), _tokens(read_json(folder / "tokenizer_config.json")),
    )  # fmt: skip


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role: transformers 5 writes them at the top, earlier files within `extra_special_tokens`."""
    found = {}
    for place in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens"), config):
        for role, value in place.items() if isinstance(place, Mapping) else ():
            content = value.get("content") if isinstance(value, Mapping) else value
            if role.endswith("_token") and isinstance(content, str) and content:
                found[role] = content
    return found
