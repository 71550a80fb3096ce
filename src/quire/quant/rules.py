"""Regular expressions by which files say which of their matrices are kept how, matched in bounded time.

A file from elsewhere may hold a pattern that takes for ever. What makes one do so are repeats of what can match in
several ways, and many repeats in a row: both are refused, and references back with them. What is left takes a second on
a name of 100 letters at worst, and microseconds as people write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quire.quant.base import Fields, QuantScheme
from quire.quant.mixed import mixed

LONGEST = 1000
MOST_REPEATS = 5
"""Places of an alternative at which something repeats without end: `.*` and `[0-9]+` are one each."""
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z<!=:>#]*|.", re.DOTALL)


@dataclass
class _Group:
    """What an open group holds: repeats of its present alternative, the most of one before, and whether it may vary."""

    repeats: int = 0
    most: int = 0
    varies: bool = False

    def close(self, inner: _Group) -> None:
        self.repeats += max(inner.repeats, inner.most)
        self.varies |= inner.varies


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern; `ValueError` with the reason when it is none, or may take too long."""
    if len(pattern) > LONGEST:
        raise ValueError(f"has {len(pattern)} characters, at most {LONGEST} are read")
    groups, ended = [_Group()], False
    for token in TOKEN.findall(pattern):
        if token in ("*", "+", "{"):
            groups[-1].repeats += 1
            if ended:
                raise ValueError("repeats a group that can match in several ways, which may take for ever")
        if re.fullmatch(r"\\[1-9]|\(\?P=.*", token):
            raise ValueError(f"has {token!r}; references back are not read")
        ended = False
        if token.startswith("("):
            groups.append(_Group())
        elif token == ")" and len(groups) > 1:
            inner = groups.pop()
            groups[-1].close(inner)
            ended = inner.varies
        elif token in ("*", "+", "{", "?", "|"):
            groups[-1].varies = True
        if token == "|":
            groups[-1].repeats, groups[-1].most = 0, max(groups[-1].repeats, groups[-1].most)
    whole = _Group()
    for group in groups:
        whole.close(group)
    if whole.repeats > MOST_REPEATS:
        raise ValueError(f"has {whole.repeats} places that repeat, at most {MOST_REPEATS} are read")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression ({error})") from None


def read_pattern(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    """The pattern, which stands in the field `name`; `ModelError` for one that is not read."""
    try:
        return compiled(pattern)
    except ValueError as error:
        raise fields.fail(name, f"the pattern {pattern!r:.80} {error}; use the unquantized checkpoint") from None


READ = ("bits", "group_size", "sym")
WITHOUT_EFFECT = frozenset(
    {"desc_act", "act_group_aware", "static_groups", "mse", "damp_percent", "damp_auto_increment"}
)
"""Fields of a rule that say how codes were found, or what tensors say as well."""


def by_rules(
    config: Fields, own: QuantScheme, matrices: Mapping[str, str], reads: Callable[[Fields], QuantScheme]
) -> QuantScheme:
    """gptqmodel's `dynamic`: the first pattern that a matrix's name begins with says what differs from `config`.

    "-:" leaves a matrix as it was, "+:" or nothing before the pattern replaces fields of `config`. `own`: the format
    without rules; `matrices`: their names here -> in the file; `reads` makes a format of fields.
    """
    dynamic = config.child("dynamic")
    rules = [(read_pattern(config, "dynamic", p.removeprefix("+:").removeprefix("-:")), p) for p in dynamic.raw]
    members: dict[str, QuantScheme] = {p: reads(_changed(config, dynamic.child(p))) for _, p in rules if p[:2] != "-:"}
    found = ((name, next((p for rule, p in rules if rule.match(there)), None)) for name, there in matrices.items())
    return mixed({name: own if p is None else members.get(p, own) for name, p in found}, own)


def _changed(config: Fields, rule: Fields) -> Fields:
    for name in rule.raw:
        if name not in READ and name not in WITHOUT_EFFECT:
            raise rule.fail(name, f"is not read here, only {', '.join(READ)} are; use the unquantized checkpoint")
    return rule.over(config)


def matrices_with(suffix: str, names: Mapping[str, str]) -> dict[str, str]:
    """The matrices that have a tensor `suffix`: their names here -> in the file, without it."""
    cut: Iterable[tuple[str, str]] = ((n, there) for n, there in names.items() if n.endswith(f".{suffix}"))
    return {n.removesuffix(f".{suffix}"): there.removesuffix(f".{suffix}") for n, there in cut}
