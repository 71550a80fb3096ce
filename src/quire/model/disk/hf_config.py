"""The only reader of a model folder's JSON: every field is checked for type and range, errors name file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.files import read_bounded, why_missing
from quire.quant.base import Fields

MAX_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`; `ModelError` when it is missing, too large, or not an object."""
    try:
        value = json.loads(read_bounded(path, MAX_BYTES).decode())
    except OSError as error:
        raise ModelError(why_missing(path, f"cannot be read: {error.strerror}")) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


class HfConfig:
    """A JSON object whose fields are read by type. null counts as absent; a field without a default must be there."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, name: str, reason: str) -> ModelError:
        """An error that names file and field; the caller raises it."""
        return ModelError(f"{self.where}: {name}: {reason}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(name) is not None

    def _get(self, name: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is ...:
                raise self.fail(name, f"is missing, needs {what}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.fail(name, f"is {value!r:.80}, needs {what}")
        return value

    def integer(self, name: str, default: Any = ..., low: int = 1, high: int = 1 << 30) -> int:
        """An integer in [low, high]."""
        value = self._get(name, default, (int,), f"an integer from {low} to {high}")
        if self.has(name) and not low <= value <= high:
            raise self.fail(name, f"is {value}, needs an integer from {low} to {high}")
        return value  # type: ignore[no-any-return]

    def number(self, name: str, default: Any = ..., low: float = 0.0, high: float = 1e30) -> float:
        """A finite number in (low, high]."""
        value: Any = self._get(name, default, (int, float), f"a number above {low:g}")
        if self.has(name) and not (math.isfinite(value) and low < value <= high):
            raise self.fail(name, f"is {value}, needs a number above {low:g} and at most {high:g}")
        return default if value is None else float(value)

    def flag(self, name: str, default: Any = ...) -> bool:
        """true or false."""
        return bool(self._get(name, default, (bool,), "true or false"))

    def text(self, name: str, default: Any = ...) -> str:
        """A string."""
        return self._get(name, default, (str,), "a string")  # type: ignore[no-any-return]

    def child(self, name: str) -> HfConfig:
        """The object under `name`, empty when absent."""
        return HfConfig(self._get(name, {}, (dict,), "an object"), f"{self.where}: {name}")

    def over(self, others: Fields) -> HfConfig:
        """`others` with these fields in the place of those that both have."""
        return HfConfig({**others.raw, **self.raw}, self.where)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        values = self._get(name, [], (list,), "a list of strings")
        if not all(isinstance(v, str) for v in values):
            raise self.fail(name, "needs a list of strings")
        return tuple(values)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, empty when absent."""
        values = self._get(name, [], (list,), "a list of integers")
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.fail(name, "needs a list of integers")
        return tuple(values)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        values = self._get(name, ..., (list,), f"a list of {length} numbers")
        good = all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v > 0 for v in values
        )
        if not good or len(values) != length:
            raise self.fail(name, f"needs a list of {length} positive numbers")
        return tuple(float(v) for v in values)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each in [0, vocab_size); empty when absent."""
        value = self._get(name, [], (int, list), "a token id or a list of them")
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            raise self.fail(name, f"is {value!r:.80}, needs token ids from 0 to {vocab_size - 1}")
        return tuple(ids)
