"""What an option says of itself beside its name and type."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Meta

from quire.core.errors import ConfigError


def about(text: str, choices: Sequence[object] = ()) -> Meta:
    """An option's help, and the values it may have where they are few."""
    return Meta(description=text, extra={"choices": tuple(map(str, choices))})


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """`ConfigError` where the value of the option `name` is not allowed."""
    if value not in allowed:
        raise ConfigError(f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(allowed)}", param=name)
