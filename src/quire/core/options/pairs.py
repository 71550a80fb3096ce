"""Options that are pairs in one text: `rate=2,input=512`, `ttft=200,itl=50`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.options.values import flag_place


def number_pairs(option: str, text: str, names: Sequence[str]) -> dict[str, str]:
    """The number, as it was written, of each name; `ConfigError` for what is no pair of a name and a number."""
    place, found = flag_place(option), dict[str, str]()
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in names or name in found:
            known = ", ".join(f"{each}=NUMBER" for each in names)
            raise place.error(f" {text!r}: {word!r} is not one of {known}, each once")
        try:
            float(value)
        except ValueError:
            raise place.error(f" {text!r}: {value!r} is no number") from None
        found[name] = value
    return found
