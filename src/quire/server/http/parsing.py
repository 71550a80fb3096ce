"""Strict JSON in pieces: what is in it is counted before it is read, and no piece keeps the interpreter's lock long.

Python's reader keeps that lock for a list of numbers from its beginning to its end, 0.1 s for a million of them, in
whatever thread it is called: so long every stream of a server stands still.
"""

from __future__ import annotations

import bisect
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.core.errors import BadRequest

PIECE = 32 << 10
"""Bytes that are read at once: some 2 ms of numbers of one digit."""
MAX_VALUES = 1 << 19
"""Values in a body: texts, numbers, lists, objects and what stands for nothing. A token id is one."""
MAX_GROUPS = 1 << 16
"""Lists and objects among them, which a search for garbage looks through."""
MAX_NAMES = 1 << 15
"""Fields of one object."""
MAX_DEPTH = 128
"""Lists and objects within each other."""
_TEXT = re.compile(rb"(?:[^\\]{1,64}|\\u[dD][89abAB]..\\u....|\\u....|\\.){1,2048}+", re.DOTALL)
"""A part of a string that ends between two characters, of 128 KiB at most."""
_SPACE = re.compile(rb"[ \t\r\n]*")


def read_json(data: bytes) -> Any:
    """Strict JSON in UTF-8: no NaN, no duplicate names, no half surrogate pairs, bounded depth and number of values."""
    if len(data) > PIECE:
        return _Reader(data).read()
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _marks(data)
    return _strict(data)


def _strict(data: bytes, at: int | None = None) -> Any:
    """One piece, which begins at the byte `at` of what it is a piece of; None: it is the whole."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        if b"\\u" in data:
            msgspec.json.encode(value)  # it refuses strings that escapes have left with half a surrogate pair
    except (json.JSONDecodeError, UnicodeError) as error:
        told = str(error) if at is None else f"{getattr(error, 'msg', 'not UTF-8')} (behind byte {at})"
        raise BadRequest(f"the body is not valid JSON: {told}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError:  # Python's own limit
        raise BadRequest("the body has an integer of more digits than any field takes") from None
    return value


def _no_constant(name: str) -> None:
    raise BadRequest(f"the body is not valid JSON: {name} is no number there")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _twice(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return fields


def _twice(name: str) -> BadRequest:
    return BadRequest(f"{name[:100]}: the field is given twice", param=name[:100])


class _Marks(NamedTuple):
    """Commas, colons and brackets outside of strings: where they are, what they are, and how deep it is behind each."""

    at: npt.NDArray[np.int64]
    kind: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.int32]


_RISE = np.zeros(256, np.int32)
_RISE[[ord("["), ord("{")]] = 1
_RISE[[ord("]"), ord("}")]] = -1
_IS_MARK = np.zeros(256, bool)
_IS_MARK[[ord(each) for each in "[]{},:"]] = True


def _marks(data: bytes) -> _Marks:
    """Marks of a text, all of them; `BadRequest` as soon as there are too many values, or they are too deep."""
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int32]]] = []
    values, groups, depth, inside = 1, 0, 0, False
    for start, block in _blocks(data):
        codes = np.frombuffer(block, np.uint8)
        within = np.logical_xor.accumulate(np.append(inside, codes == ord('"')))[1:]
        inside = bool(within[-1])
        at = np.flatnonzero(_IS_MARK[codes] & ~within)
        kind = codes[at]
        deep = np.cumsum(_RISE[kind], dtype=np.int32) + np.int32(depth)
        depth = int(deep[-1]) if len(deep) else depth
        # Each value but the first of a list or an object has a comma before it.
        groups += int(np.count_nonzero((kind == ord("[")) | (kind == ord("{"))))
        values += int(np.count_nonzero(kind == ord(",")))
        if values + groups > MAX_VALUES:
            raise BadRequest(f"the body has more than {MAX_VALUES} values, which is the bound of bodies")
        if groups > MAX_GROUPS:
            raise BadRequest(f"the body has more than {MAX_GROUPS} lists and objects, which is the bound of bodies")
        if len(deep) and int(deep.max()) > MAX_DEPTH:
            raise BadRequest(f"the body is nested too deeply: more than {MAX_DEPTH} lists and objects in each other")
        found.append((at + start, kind, deep))
    return _Marks(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _blocks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Blocks of `data` with where they begin; what is escaped in them is made plain, and no escape is cut."""
    start = 0
    while start < len(data):
        end = min(start + 2 * PIECE, len(data))
        block = data[start:end]
        if (len(block) - len(block.rstrip(b"\\"))) % 2 and end < len(data):
            end += 1
            block = data[start:end]
        if b"\\" in block:
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield start, block
        start = end


class _Reader:
    """Reads large lists, objects and strings part by part."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._marks = _marks(data)

    def read(self) -> Any:
        """The whole value."""
        return self._value(0, len(self._data), 0)

    def _value(self, start: int, end: int, depth: int) -> Any:
        """What stands between two places, `depth` lists and objects around it."""
        start, end = self._trimmed(start, end)
        if end - start <= PIECE:
            return _strict(self._data[start:end], start)
        first, last = self._data[start : start + 1], self._data[end - 1 : end]
        if first == last == b'"':
            return "".join(self._texts(start + 1, end - 1))
        if first + last not in (b"[]", b"{}"):
            _strict(self._data[start : start + PIECE], start)
            raise self._invalid("no value is as long as this one", start)
        low, high = np.searchsorted(self._marks.at, (start + 1, end - 1))
        depths = self._marks.depth[low:high]
        if high > low and int(depths.min()) <= depth:
            raise self._invalid("more than one value", start)
        commas = (self._marks.kind[low:high] == ord(",")) & (depths == depth + 1)
        cuts = array("q", np.concatenate(([start], self._marks.at[low:high][commas], [end - 1])).tobytes())
        return self._list(cuts, depth) if first == b"[" else self._object(cuts, depth)

    def _trimmed(self, start: int, end: int) -> tuple[int, int]:
        while (found := _SPACE.match(self._data, start, min(start + PIECE, end))) and found.end() > start:
            start = found.end()
        while end > start:
            block = self._data[max(start, end - PIECE) : end]
            kept = len(block.rstrip(b" \t\r\n"))
            end -= len(block) - kept
            if kept:
                break
        return start, end

    def _runs(self, cuts: array[int]) -> Iterator[tuple[int, int]]:
        """Members between `cuts`, as many at once as are read at once, or one that is larger.

        Without numpy, which gives the interpreter's lock away for a moment in each call: whoever waits for it is woken
        by that, comes too late, and begins to wait anew. An event loop stood still for 30 ms beside such a thread.
        """
        i = 0
        while i + 1 < len(cuts):
            j = max(i + 1, bisect.bisect_right(cuts, cuts[i] + PIECE) - 1)
            start, end = cuts[i] + 1, cuts[j]
            if len(cuts) > 2 and self._trimmed(start, end)[0] == end:
                raise self._invalid("a value is missing", start)
            yield start, end
            i = j

    def _list(self, cuts: array[int], depth: int) -> list[Any]:
        found: list[Any] = []
        for start, end in self._runs(cuts):
            if end - start > PIECE:
                found.append(self._value(start, end, depth + 1))
            else:
                found += _strict(b"[%b]" % self._data[start:end], start)
        return found

    def _object(self, cuts: array[int], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if len(cuts) - 1 > MAX_NAMES:
            raise BadRequest(f"an object in the body has {len(cuts) - 1} fields, which are more than {MAX_NAMES}")
        for start, end in self._runs(cuts):
            if end - start > PIECE:
                more = self._field(start, end, depth)
            else:
                more = _strict(b"{%b}" % self._data[start:end], start)
            for name in more.keys() & found.keys():
                raise _twice(name)
            found |= more
        return found

    def _field(self, start: int, end: int, depth: int) -> dict[str, Any]:
        """The one field of an object that is between two places."""
        low, high = np.searchsorted(self._marks.at, (start, end))
        colons = (self._marks.kind[low:high] == ord(":")) & (self._marks.depth[low:high] == depth + 1)
        if not colons.any():
            raise self._invalid("a name without a value", start)
        colon = int(self._marks.at[low:high][colons][0])
        name = self._value(start, colon, depth + 1)
        if not isinstance(name, str):
            raise self._invalid("a name must be a string", start)
        return {name: self._value(colon + 1, end, depth + 1)}

    def _texts(self, start: int, end: int) -> Iterator[str]:
        """The string between two places, in parts."""
        while start < end:
            found = _TEXT.match(self._data, start, end)
            if found is None:
                raise self._invalid("a string ends within an escape", start)
            stop = found.end()
            while stop < end and self._data[stop] & 0xC0 == 0x80:  # within a character of several bytes
                stop += 1
            yield _strict(b'"%b"' % self._data[start:stop], start)
            start = stop

    @staticmethod
    def _invalid(told: str, at: int) -> BadRequest:
        return BadRequest(f"the body is not valid JSON: {told} (behind byte {at})")
