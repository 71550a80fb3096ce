"""Whether a regular expression that cuts texts takes time in proportion to them, whatever the text.

Tokenizers' expressions are matched by backtracking. What is said to be linear here is so by its form: an alternative
never gives back what it took by an unbounded quantifier, as nothing that could fail stands behind one; or it is one of
a few forms of published tokenizers, in which a later alternative takes what an earlier one gave back. Of others nothing
is known, and that is what is said.
"""

from __future__ import annotations

import re

MOST_WAYS = 256
"""Ways that an alternative's bounded quantifiers may have to match, in all, and characters that they may take."""
_CLASS = r"\[\^?\]?(?:\\[pP]\{[^}]*\}|\\.|&(?!&)|[^\]\\\[&])*\]"
_SINGLE = rf"(?:\\[pP]\{{[^}}]*\}}|\\[^bBGKRXkgQEzZA1-9]|{_CLASS}|[^\\\[\](){{}}|*+?^$])"
_GROUP = r"\(\?(?:i?:)(?P<inner>(?:\\[pP]\{[^}]*\}|\\.|\[[^\]\\\[]*\]|[^()\\\[\]])*)\)"
_ITEM = re.compile(
    rf"(?:{_GROUP}|(?P<one>{_SINGLE}))(?P<times>[?*+]|\{{(?P<least>\d+)(?P<open>,(?P<most>\d*))?\}})?(?P<more>[?+])?",
    re.DOTALL,
)
_GIVES_BACK = frozenset({r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]"})
"""Alternatives that give back spaces, one or all of which `_SPACES` take then."""
_SPACES = frozenset({r"\s+", r"\s+(?!\S)"})
_PAIR = re.compile(r"(.*?)(\[[^\]]+\])\*(\[[^\]]+\])\+(.*)", re.DOTALL)
"""What cuts words by the case of their letters: it gives letters back that the next alternative takes."""
_PUBLISHED = frozenset({" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"})
"""Expressions that have been looked at: BLOOM's."""


def is_linear(pattern: str) -> bool:
    """Whether matching `pattern` all through a text is known to take time in proportion to the text."""
    if pattern in _PUBLISHED:
        return True
    ways = _alternatives(pattern)
    for i, way in enumerate(ways):
        if _keeps(way):
            continue
        if way in _GIVES_BACK and (way in _SPACES or _SPACES & set(ways[i + 1 :])):
            continue
        pair = _PAIR.fullmatch(way)
        if pair is None or i + 1 == len(ways):
            return False
        before, upper, lower, behind = pair.groups()
        if ways[i + 1] != f"{before}{upper}+{lower}*{behind}" or not _keeps(ways[i + 1]):
            return False
    return True


def _alternatives(pattern: str) -> list[str]:
    """What stands between the bars that are in no group and no class."""
    found, depth, inside, begun, at = list[str](), 0, False, 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif inside:
            inside = character != "]"
        elif character == "[":
            inside = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            found.append(pattern[begun:at])
            begun = at + 1
        at += 1
    return [*found, pattern[begun:]]


def _keeps(way: str, nested: bool = False) -> bool:
    """Whether an alternative gives nothing back that an unbounded quantifier took, and has few ways to match.

    `nested`: it stands in a group, and may have no such quantifier.
    """
    at, unbounded, ways = 0, False, 1
    while at < len(way):
        item = _ITEM.match(way, at)
        if item is None:
            return False
        times, least = item["times"] or "", int(item["least"] or 0)
        endless = times in ("*", "+") or item["most"] == ""
        may_fail = times not in ("?", "*") and not (item["least"] is not None and least == 0)
        if (unbounded and may_fail) or (endless and nested) or (times[:1] == "{" and item["more"] == "+"):
            return False
        if item["inner"] is not None and not _is_plain(item["inner"], times):
            return False
        most = int(item["most"]) if item["most"] else least
        ways *= 2 if times == "?" else max(1, most)
        if item["inner"] is not None:
            ways *= 1 + item["inner"].count("|") + item["inner"].count("?")
        unbounded, at = unbounded or endless, item.end()
    return ways <= MOST_WAYS


def _is_plain(inner: str, times: str) -> bool:
    """Whether a group with a quantifier has few ways to match: repeated ones have no quantifier and, where they must be
    there more than once, no alternatives."""
    ways = _alternatives(inner)
    if times not in ("", "?") and re.search(r"(?<!\\)[?*+{]", inner.replace(r"\p{", "").replace(r"\P{", "")):
        return False
    return (times[:1] != "{" or len(ways) == 1) and all(_keeps(each, True) for each in ways)
