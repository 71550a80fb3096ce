"""The process that checks answers by their JSON schemas, which come with requests and are trusted with nothing.

A pattern may take for ever in Python, a reference may recur without end, and an answer may be long. So the kernel
bounds it (`quire.text.bounded_process` says how it is started): `schema_check_worker.py FOLDERS MEMORY`. Nothing is
fetched: no file can be opened and no socket. What is checked is what JSON Schema asserts, and formats that grammars
hold.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema import FormatChecker
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

HEAD = struct.Struct("!Id")
MOST = 8
"""Errors of one answer that are told."""
LENGTH = 200
"""Characters of one."""
KEPT = 64
"""Schemas whose validators are kept."""
_DRAFTS = (
    ("draft-04", jsonschema.Draft4Validator), ("draft-06", jsonschema.Draft6Validator),
    ("draft-07", jsonschema.Draft7Validator), ("2019-09", jsonschema.Draft201909Validator),
)  # fmt: skip
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def _day(text: str) -> bool:
    try:
        return re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII) is not None and bool(date.fromisoformat(text))
    except ValueError:
        return False


def _address(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return "%" not in text and bool(kind(text))
        except ValueError:
            return False

    return check


def _matching(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.ASCII) is not None


FORMATS: Mapping[str, Callable[[str], bool]] = {
    "date": _day,
    "time": _matching(_TIME),
    "date-time": lambda text: _day(text[:10]) and re.fullmatch(f"[Tt]{_TIME}", text[10:], re.ASCII) is not None,
    "duration": _matching(r"P(?:\d+W|(?=.)(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=.)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)"),
    "email": lambda text: text.count("@") >= 1 and not text.startswith("@") and not text.endswith("@"),
    "hostname": lambda text: len(text) <= 253 and re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", text, re.ASCII) is not None,
    "ipv4": _address(ipaddress.IPv4Address),
    "ipv6": _address(ipaddress.IPv6Address),
    "uuid": _matching(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uri": _matching(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*"),
}


def _checker() -> FormatChecker:
    made = FormatChecker(formats=())
    for name, function in FORMATS.items():
        made.checks(name)(lambda value, check=function: not isinstance(value, str) or check(value))
    return made


Errors = Iterator[jsonschema.ValidationError]


@lru_cache(256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """None: it is none of Python's; such are held by the grammar alone."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Errors:
    if isinstance(value, str) and (made := _compiled(pattern)) is not None and not made.search(value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _patterns(validator: Any, patterns: Any, value: Any, schema: Any) -> Errors:
    for pattern, inner in patterns.items() if isinstance(value, dict) else ():
        made = _compiled(pattern)
        for name, item in value.items():
            if made is not None and made.search(name):
                yield from validator.descend(item, inner, path=name, schema_path=pattern)


def _others(validator: Any, others: Any, value: Any, schema: Any) -> Errors:
    """Names that neither `properties` nor a pattern has; where a pattern cannot be read, the grammar holds it."""
    patterns = [_compiled(pattern) for pattern in schema.get("patternProperties", ())]
    if not isinstance(value, dict) or None in patterns:
        return
    known = schema.get("properties", {})
    for name, item in value.items():
        if name not in known and not any(made is not None and made.search(name) for made in patterns):
            if others is False:
                yield jsonschema.ValidationError(f"the name {name!r} is not allowed")
            else:
                yield from validator.descend(item, others, path=name)


def _unique(validator: Any, unique: Any, value: Any, schema: Any) -> Errors:
    if unique is True and isinstance(value, list):
        seen = set()
        for item in value:
            name = json.dumps(_plain(item), sort_keys=True)
            if name in seen:
                yield jsonschema.ValidationError(f"{item!r} is there twice")
                return
            seen.add(name)


def _plain(value: Any) -> Any:
    """Convert a value, with whole numbers as integers, as JSON Schema calls those equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


@lru_cache(KEPT)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    found = next((kind for name, kind in _DRAFTS if name in named), None)
    if found is None:
        found = jsonschema.Draft202012Validator if "items" not in text or not _has_lists(schema) else _DRAFTS[2][1]
    own = {"pattern": _pattern, "patternProperties": _patterns, "additionalProperties": _others, "uniqueItems": _unique}
    kind: Any = extend(found, own)
    return kind(schema, registry=REGISTRY, format_checker=_checker())


def _has_lists(schema: Any) -> bool:
    """Whether `items` is a list somewhere, as it was up to draft 2019-09."""
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            if isinstance(found.get("items"), list):
                return True
            left += [value for name, value in found.items() if name not in ("const", "default", "enum", "examples")]
    return False


def _twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        raise _Twice(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


class _Twice(Exception):
    """A name that an object has twice."""


def check(job: Mapping[str, Any]) -> list[dict[str, str]]:
    """{"path", "message"} of each error of "text" by "schema"; none: it is valid. `path` is a JSON pointer."""
    try:
        value = json.loads(job["text"], object_pairs_hook=_twice)
    except _Twice as error:
        return [{"path": "", "message": f"an object has the name {str(error)!r} twice"[:LENGTH]}]
    except (ValueError, RecursionError) as error:
        return [{"path": "", "message": f"it is not JSON: {error}"[:LENGTH]}]
    found = []
    for wrong in _validator(job["schema"]).iter_errors(value):
        path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in wrong.absolute_path)
        found.append({"path": path[:LENGTH], "message": wrong.message[:LENGTH]})
        if len(found) == MOST:
            break
    return found


def main(memory: int) -> None:
    """Answer jobs until the socket ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    warm = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "$defs": {"b": {}},
            "required": ["b"], "oneOf": [{"$ref": "#/$defs/b"}, False]}  # fmt: skip
    for name in ("draft-04", "draft-06", "draft-07", "2019-09", ""):  # no file can be opened later
        check({"schema": json.dumps({**warm, "$schema": name}), "text": '{"a": "2001-02-29"}'})
    at_rest = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in (
        ("RLIMIT_AS", at_rest + memory), ("RLIMIT_NOFILE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
    ):  # fmt: skip
        resource.setrlimit(getattr(resource, name), (most, most))
    _write({})
    while True:
        size, seconds = HEAD.unpack(_take(HEAD.size))
        job = json.loads(_take(size))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply: dict[str, Any] = {"errors": check(job)}
        except Exception as error:  # of the schema: a reference that recurs, or names what is not at hand
            reply = {"error": f"{type(error).__name__}: {error}"[:LENGTH]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reply)


def _take(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(size - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _write(reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(0, rest) :]


if __name__ == "__main__":
    import sys

    main(int(sys.argv[3]))
