"""What is asked of an engine, and what it must keep: `--load batch=8,input=512,output=128`, `--slo ttft=200,itl=50`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from quire.core.errors import ConfigError
from quire.core.options.fields import fields_of
from quire.core.options.values import flag_place, from_text, number_pairs, read_options

T = TypeVar("T", bound=msgspec.Struct)
MOST = 1 << 24
"""Of any number of a load."""


class PlannedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`batch` requests that come at once, or, with a `rate`, so many a second for ever (Poisson). Lengths in tokens;
    of a prompt's `input` tokens `shared` are found in the prefix cache.
    """

    batch: int = 1
    rate: float = 0.0
    input: int = 512
    output: int = 128
    shared: int = 0

    def check(self) -> PlannedLoad:
        """Itself; `ConfigError` for what no load is."""
        for name, least in (("batch", 1), ("input", 1), ("output", 1), ("shared", 0)):
            if not least <= getattr(self, name) <= MOST:
                raise ConfigError(f"--load {name}={getattr(self, name)}: must lie in [{least}, {MOST:,}]", param="load")
        if not 0 <= self.rate <= MOST:
            raise ConfigError(f"--load rate={self.rate:g}: must be requests a second", param="load")
        if self.shared >= self.input:
            raise ConfigError(
                f"--load shared={self.shared}: at least one of input={self.input} tokens is computed", param="load"
            )
        return self


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Most milliseconds to the first token and between tokens, as means; 0: no target."""

    ttft: float = 0.0
    itl: float = 0.0

    def check(self) -> Slo:
        """Itself; `ConfigError` for a negative one."""
        if not (self.ttft >= 0 and self.itl >= 0):
            raise ConfigError("--slo: milliseconds must not be negative", param="slo")
        return self


def parse_load(text: str) -> PlannedLoad:
    """`PlannedLoad` of "rate=2,input=512,output=128"; `ConfigError` names what it is not."""
    given = number_pairs("load", text, PlannedLoad.__struct_fields__)
    if "rate" in given and "batch" in given:
        raise ConfigError("--load: rate= are requests a second, batch= those that come at once; give one", param="load")
    if "rate" in given and float(given["rate"]) <= 0:
        raise ConfigError(f"--load rate={given['rate']}: must be above 0", param="load")
    return _made("load", given, PlannedLoad).check()


def parse_slo(text: str) -> Slo:
    """`Slo` of "ttft=200,itl=50"."""
    return _made("slo", number_pairs("slo", text, Slo.__struct_fields__), Slo).check()


def _made(option: str, given: dict[str, str], struct: type[T]) -> T:
    numbers = {field.name: from_text(field, given[field.name]) for field in fields_of(struct) if field.name in given}
    return read_options(struct, numbers, flag_place(option).key)
