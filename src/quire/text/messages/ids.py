"""Ids of calls: new ones, and those of histories from elsewhere where a template takes short ones alone."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.core.request import random_id

LENGTH = 9
_SHORT = re.compile(f"[A-Za-z0-9]{{{LENGTH}}}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def call_id() -> str:
    """A new id as OpenAI's are."""
    return f"call_{random_id()}"


def short_id(given: str) -> str:
    """Nine letters and digits that depend on `given` alone."""
    number = int.from_bytes(hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    found = ""
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        found += _DIGITS[digit]
    return found


class ShortIds:
    """Ids of one conversation: an id of nine letters and digits stays, each other gets one that no other has."""

    def __init__(self, given: Sequence[str]) -> None:
        self._taken = {name for name in given if _SHORT.fullmatch(name)}
        self._made: dict[str, str] = {name: name for name in self._taken}

    def of(self, given: str) -> str:
        """Give the same id for the same, always."""
        if given not in self._made:
            tries = (short_id(given if not i else f"{given} {i}") for i in itertools.count())
            found = next(name for name in tries if name not in self._taken)
            self._taken.add(found)
            self._made[given] = found
        return self._made[given]


def shorten(messages: Sequence[dict[str, Any]]) -> None:
    """Write short ids into messages as templates have them, alike into calls and results.

    A call without an id gets one by its place, and a result without one that of the first call that has none yet.
    """
    given = [call["id"] for message in messages for call in message.get("tool_calls", ()) if "id" in call]
    given += [message["tool_call_id"] for message in messages if "tool_call_id" in message]
    ids, open_ = ShortIds(given), deque[str]()
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            call["id"] = ids.of(call.get("id", f"messages[{i}].tool_calls[{j}]"))
            open_.append(call["id"])
        if message.get("role") != "tool":
            continue
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.of(message["tool_call_id"])
            if message["tool_call_id"] in open_:
                open_.remove(message["tool_call_id"])
        elif open_:
            message["tool_call_id"] = open_.popleft()
