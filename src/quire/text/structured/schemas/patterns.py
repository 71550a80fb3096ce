"""Regular expressions as ECMA has them -> such as a grammar reads, without looking ahead."""

from __future__ import annotations

import re
from collections.abc import Iterable

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_TWO = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP = f"(?:[0-9]{{2}}{_TWO}|{_TWO}00)"
DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
"""Days that there are, of years from 1."""
UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
NAMES = {"date": DATE, "uuid": UUID, "ipv4": f"{_OCTET}(?:\\.{_OCTET}){{3}}"}
"""Formats that names of properties can have by a pattern."""
ANY = "(?s:.)*"
_AHEAD, _LOOKS = ("(?=", "(?!"), ("(?=", "(?!", "(?<=", "(?<!")
_UNIT = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$]|\[\^?(?:\\.|[^\\\]])+\]")
_LITERAL = re.compile(r"(?:\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$])+")
LONGEST = 100
"""Characters of a word that is excluded."""


def without_lookahead(pattern: str) -> list[str] | None:
    """Patterns that a text has all of when it has `pattern`, or hardly less; None where that is not known."""
    if not any(look in pattern for look in _LOOKS):
        return [pattern]
    if not pattern.startswith("^"):
        return None
    rest, found = pattern[1:], list[str]()
    while rest.startswith(_AHEAD):
        end = _closing(rest)
        if end is None:
            return None
        body, negative, rest = rest[3:end], rest.startswith("(?!"), rest[end + 1 :]
        made = _never(body) if negative else f"^(?:{body})"
        if made is None or any(look in made for look in _LOOKS):
            return None
        found.append(made)
    if any(look in rest for look in _LOOKS) or _has_ways(rest):
        return None
    return [f"^{rest}", *found] if rest else found


def beside(words: Iterable[str]) -> str | None:
    """Any text but `words`."""
    return _excluding(list(words), whole=True)


def _closing(text: str) -> int | None:
    """Where the group ends that `text` begins with."""
    depth, at, inside = 0, 0, False
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if not depth:
                return at
        at += 1
    return None


def _has_ways(text: str) -> bool:
    """Whether `text` has an alternative outside of groups."""
    at = 0
    while at < len(text):
        char = text[at]
        if char == "|":
            return True
        if char == "(":
            end = _closing(text[at:])
            if end is None:
                return True
            at += end
        elif char == "[":
            at += 1
            while at < len(text) and text[at] != "]":
                at += 2 if text[at] == "\\" else 1
        elif char == "\\":
            at += 1
        at += 1
    return False


def _never(body: str) -> str | None:
    """A pattern of texts of which no beginning is `body`, for bodies that are often seen."""
    if body in (r"\s*$", r"\s+$", r"^\s*$"):
        return r"\S" if body != r"\s+$" else r"^(?:|(?s:.)*\S(?s:.)*)$"
    if body.startswith(".*"):
        return _without(body[2:].removesuffix(".*"))
    ends, words = body.endswith("$"), _words(body.removesuffix("$"))
    if words is not None:
        if ends and len(words) > 1 and not body.startswith("("):
            return None  # $ is of the last alternative alone
        return _excluding(words, whole=ends)
    if _UNIT.fullmatch(body):
        return f"^(?:{_other(body)}{ANY})?$"
    return None


def _without(inner: str) -> str | None:
    """Texts in which `inner`, one or two characters, does not stand."""
    if _UNIT.fullmatch(inner):
        return f"^{_other(inner)}*$"
    words = _words(inner)
    if words is None or len(words) != 1 or len(words[0]) != 2:
        return None
    first, second = map(_spelled, words[0])
    if first == second:
        return f"^(?:[^{first}]|{first}[^{first}])*{first}?$"
    return f"^(?:[^{first}]|{first}+[^{first}{second}])*{first}*$"


def _other(unit: str) -> str:
    if unit.startswith("[^"):
        return f"[{unit[2:]}"
    if unit.startswith("["):
        return f"[^{unit[1:]}"
    if unit[0] == "\\" and unit[1].isalpha():
        return unit.swapcase()
    return f"[^{_spelled(unit[-1])}]"


def _words(body: str) -> list[str] | None:
    """The texts of a literal, or of a group of some."""
    inner = next((body[len(o) : -1] for o in ("(?:", "(") if body.startswith(o) and body.endswith(")")), body)
    parts = inner.split("|")
    if not all(_LITERAL.fullmatch(part) for part in parts):
        return None
    return [re.sub(r"\\(.)", r"\1", part) for part in parts]


def _excluding(words: list[str], whole: bool) -> str | None:
    """Texts that are none of `words` (`whole`), or do not begin with one."""
    if not words or not (whole or all(words)) or max(map(len, words)) > LONGEST:
        return None
    tree: dict[str, dict[str, object]] = {}
    for word in words:
        node: dict[str, object] = tree  # type: ignore[assignment]
        for char in word:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return f"^{_branch(tree, whole)}$"


def _branch(node: dict[str, dict[str, object]], whole: bool) -> str:
    chars = [char for char in node if char]
    ways = [] if "" in node else [""]
    ways.append(f"[^{''.join(map(_spelled, chars))}]{ANY}" if chars else f"(?s:.){ANY}")
    open_ = [char for char in chars if whole or "" not in node[char]]
    ways += [_spelled(char) + _branch(node[char], whole) for char in open_]  # type: ignore[arg-type]
    return f"(?:{'|'.join(ways)})"


def _spelled(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
