"""Short completions of a grammar, byte by byte: how a text that has begun can be brought to an end.

llguidance says what may come next and not how far the end is, so that is searched, over a vocabulary of single bytes,
whose masks take microseconds. The search dives: of the bytes that may follow it takes the one that most likely leads to
the end, to the end. Then it does the same from the places where it had a choice, those with the fewest departures from
its preference first (limited discrepancy search, Harvey and Ginsberg 1995), bounded by the best end found so far. What
it finds is a completion, and mostly a shortest one. It depends on the grammar and the text alone. In free text, where
any byte leads on and none to the end, texts that the grammar itself writes out are tried (`hints_of`).

The process that checks grammars (`helper`) uses this file, so it needs nothing but llguidance.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS = LLParserLimits(max_lexer_states=50_000, step_max_items=50_000, verbose_errors=False)
"""Of every matcher, in items and states and never in seconds, so that they hold or not on every machine alike."""
MANY = 48
"""More bytes than this may follow within free text alone: a quote ends it there, and elsewhere it begins one."""
PATIENCE = 3
"""How often the same choice is made in the same place, where without that no end was found."""
CHOICES = 8
"""Most bytes that are tried in one place."""
HINTS = 32
"""Most texts of a grammar that are tried in one place."""
_CLOSERS, _JOINERS, _SPACES = frozenset(b"}])>"), frozenset(b",:"), frozenset(b" \t\r\n")
_QUOTE = 0x22
_DIGITS = b"1987654320"
"""Ones first: 1111-11-11T11:11:11Z is a time everywhere, 23:59:60 only where leap seconds are known."""
_LATE, _LAST = frozenset(b"[{(<."), frozenset(b"\\+-")


@dataclass(frozen=True)
class Effort:
    """How far a search goes: dives of at most `longest` bytes, each bound in turn, with `steps` of choice for each.

    `patient`: steps for a second look where the first found no end, which makes the same choice several times in the
    same place. `more`: steps after the first completion, to find a shorter one.
    """

    longest: tuple[int, ...]
    steps: int
    patient: int
    more: int


FIRST = Effort((256, 4096, 32768), 2000, 2000, 400)
"""Before a request is taken: what it finds is what `max_tokens` is held against."""
LATER = Effort((256, 4096, 32768), 100, 200, 24)
"""While tokens are drawn, and others wait: 0.1 s where no end is found. Of 450 searches behind random texts of 700
schemas, all that found an end but three did so within 100 steps and 100 patient ones."""


class ByteTokens:
    """What llguidance asks of a tokenizer: the bytes of each id; ids in `special` are names that no text spells."""

    def __init__(self, tokens: Sequence[bytes], special: Iterable[int], eos: int) -> None:
        self.tokens, self.special_token_ids = list(tokens), list(special)
        self.eos_token_id, self.bos_token_id = eos, None

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest tokens first; only texts that a grammar forces are read so."""
        data, found, at = text.encode() if isinstance(text, str) else text, list[int](), 0
        while at < len(data):
            size = next(
                (n for n in range(min(self.longest, len(data) - at), 0, -1) if data[at : at + n] in self.ids), 0
            )
            if not size:
                return found
            found.append(self.ids[data[at : at + size]])
            at += size
        return found

    @property
    def ids(self) -> dict[bytes, int]:
        """Bytes -> the id of the token that spells them."""
        if not hasattr(self, "_ids"):
            special = set(self.special_token_ids)
            self._ids = {b: i for i, b in reversed(list(enumerate(self.tokens))) if b and i not in special}
        return self._ids

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        if not hasattr(self, "_longest"):
            self._longest = max(map(len, self.ids), default=0)
        return self._longest


def token_name(token: str) -> str:
    """What a special token is called in Lark, which has names for those alone that look like tags."""
    return token if _TAG.fullmatch(token) else f"<|{_NO_NAME.sub('_', token)}|>"


def byte_tokenizer(special: Sequence[str]) -> LLTokenizer:
    """256 tokens of a byte each, then `special` ones, then the end."""
    names = [token_name(name).encode() for name in special]
    end = 256 + len(names)
    tokens = [bytes([i]) if i not in _NEVER else b"" for i in range(256)]
    plain = ByteTokens([*tokens, *names, b"<the end>"], range(256, end + 1), end)
    return LLTokenizer(TokenizerWrapper(plain), n_vocab=end + 1, eos_token=end, slices=[])


_TAG, _NO_NAME = re.compile(r"<[^<>\s\[\]]+>"), re.compile(r"[<>\s]")
_NEVER = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that no UTF-8 has."""


def hints_of(grammar: str) -> tuple[bytes, ...]:
    """Texts in quotes of a grammar's Lark, those of terminals first, as these say where free text ends; and what stands
    in patterns of its JSON schemas that may match anywhere in a text."""
    made = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    lines = [line for each in made for line in (each.get("lark_grammar") or "").splitlines() if "%json" not in line]
    lines.sort(key=lambda line: not _TERMINAL.match(line))
    found = dict.fromkeys(text for line in lines for text in _QUOTED.findall(line))
    found |= dict.fromkeys(json.dumps(text) for each in made for text in _sought(each.get("json_schema")))
    return tuple(text.encode("utf-8", "surrogatepass") for text in map(_unquoted, list(found)[:HINTS]) if text)


def _sought(schema: object) -> Iterator[str]:
    """Find of each pattern that does not say how a text begins the longest run of plain characters."""
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += reversed(found)
        elif isinstance(found, dict):
            pattern = found.get("pattern")
            if isinstance(pattern, str) and not pattern.startswith("^"):
                plain = max(_PLAIN.findall(pattern), key=len, default="")
                if len(plain) > 1:
                    yield re.sub(r"\\(.)", r"\1", plain)
            left += reversed(found.values())


_PLAIN = re.compile(r"(?:(?:\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$])(?![*+?{]))+")
_TERMINAL, _QUOTED = re.compile(r"\s*[A-Z_][A-Z0-9_]*\s*(\[[^\]]*\]\s*)?:"), re.compile(r'"(?:[^"\\]|\\.){1,64}"')


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def shortest(
    matcher: LLMatcher,
    end: int,
    effort: Effort,
    usable: frozenset[int] | None = None,
    hints: tuple[bytes, ...] = (),
) -> list[int] | None:
    """Byte tokens that complete what `matcher`, over a `byte_tokenizer` whose end is `end`, has read; None: none found.

    `usable`: bytes that the model's vocabulary can spell; `hints`: of the grammar. The matcher is left as it was,
    unless it is in error.
    """
    spelled = tuple(hint for hint in hints if usable is None or usable.issuperset(hint))
    return _Search(matcher, end, usable, spelled).run(effort)


class _Way(NamedTuple):
    """The first `size` bytes of a path and another one behind them, of those that could follow; what could before."""

    path: list[int]
    size: int
    byte: int | None
    before: bytes


class _Search:
    def __init__(self, matcher: LLMatcher, end: int, usable: frozenset[int] | None, hints: tuple[bytes, ...]) -> None:
        self.matcher, self.end, self.usable, self.hints = matcher, end, usable, hints
        self.path: list[int] = []
        self.best: list[int] | None = None
        self.steps = 0
        self.cut = False
        self.patience = 0

    def run(self, effort: Effort) -> list[int] | None:
        """The best completion there is within `effort`."""
        for self.patience, steps in ((0, effort.steps), (PATIENCE, effort.patient)):
            for longest in effort.longest:
                cut = self._try(longest, steps, effort.more)
                if self.best is not None or not cut:
                    break
            if self.best is not None or not cut:
                break
        self._go([])
        return None if self.matcher.is_error() else self.best

    def _try(self, longest: int, left: int, more: int) -> bool:
        """Look for completions of at most `longest` bytes in `left` steps; whether a way was cut off."""
        self.cut = False
        waiting = deque([_Way([], 0, None, b"")])
        while waiting and left > 0 and not self.matcher.is_error():
            begun, had = self.steps, self.best is not None
            way = waiting.popleft()
            bound = longest if self.best is None else len(self.best) - 1
            if way.size < bound:
                waiting.extend(self._dive(way, bound, left))
            left -= self.steps - begun + 1
            if self.best is not None and not had:
                left = min(left, more)
        return self.cut or bool(waiting)

    def _dive(self, way: _Way, bound: int, left: int) -> Iterator[_Way]:
        """Follow the first choice from `way` to an end of at most `bound` bytes; the other choices on the way."""
        others: list[tuple[int, int, bytes]] = []
        going = self._go(way.path[: way.size]) and (way.byte is None or self._read([way.byte]))
        before, begun, taken = way.before, self.steps, Counter[tuple[bytes, int]]()
        while going and not self.matcher.is_accepting():
            forced = self._forced()
            if len(self.path) + len(forced) >= bound or self.steps - begun > left:
                self.cut, going = True, False
            elif forced:
                before, going = b"", self._read(forced)
            else:
                self.steps += 1
                may, place = self._may(), len(self.path)
                ranked = _ranked(may, before, self.end, self.usable, bool(self.patience))
                if not ranked:
                    break
                if self.hints and self._hinted(may, bound):
                    others += [(place, byte, may) for byte in ranked]
                    before = b""
                    continue
                choice = ranked[0]
                if self.patience:  # it turned in a circle before
                    choice = min(ranked, key=lambda byte: taken[may, byte] // self.patience)
                    taken[may, choice] += 1
                others += [(place, byte, may) for byte in ranked if byte != choice]
                before, going = may, self._read([choice])
        path = list(self.path)
        if going and self.matcher.is_accepting():
            self.best = path
        return (_Way(path, size, byte, may) for size, byte, may in others)

    def _hinted(self, may: bytes, bound: int) -> bool:
        """Read a hint that leads out of free text; whether there is one."""
        if int.from_bytes(may, "little").bit_count() <= MANY:
            return False
        for hint in self.hints:
            if len(self.path) + len(hint) < bound and self.matcher.validate_tokens(list(hint)) == len(hint):
                if self._read(list(hint)) and (self.matcher.is_accepting() or self._may() != may):
                    return True
                self._go(self.path[: len(self.path) - len(hint)])
        return False

    def _go(self, path: list[int]) -> bool:
        """Have the matcher stand behind `path`; False where it does not take it, or gave up."""
        size = min(len(self.path), len(path))
        same = size if self.path[:size] == path[:size] else next(i for i in range(size) if self.path[i] != path[i])
        if same < len(self.path):
            self.matcher.rollback(len(self.path) - same)
            del self.path[same:]
        return self._read(path[same:])

    def _read(self, more: list[int]) -> bool:
        taken = self.matcher.try_consume_tokens(more) if more else 0
        self.path += more[:taken]
        return taken == len(more) and not self.matcher.is_error()

    def _forced(self) -> list[int]:
        """Bytes that must follow, as far as no special token is among them, before whose name llguidance has a 0xFF."""
        forced = list(bytes(self.matcher.compute_ff_bytes()).partition(b"\xff")[0])
        return forced if self.usable is None or self.usable.issuperset(forced) else []

    def _may(self) -> bytes:
        """What may follow, byte tokens and special ones, as bits."""
        return bytes(self.matcher.compute_bitmask())


@lru_cache(4096)
def _ranked(may: bytes, before: bytes, end: int, usable: frozenset[int] | None, wide: bool) -> tuple[int, ...]:
    """The likeliest ways to an end first: what closes, what goes on, what was not possible `before`, what is short.

    In free text, where nearly everything may follow, a quote ends it and the rest is no better than any letter.
    `wide`: all of them, and not some for their kind.
    """
    found, old = _listed(may, end), set(_listed(before, end))
    if usable is not None:
        found = [i for i in found if i >= 256 or i in usable]
    if len(found) > len(_SPACES) and set(found) >= _SPACES:  # as JSON has them, where they mean nothing
        found = [i for i in found if i not in _SPACES]
    free = len(found) > MANY

    def rank(byte: int) -> tuple[int, int, int]:
        stale = int(byte in old)
        letter, digit = byte < 128 and chr(byte).isalpha(), 0x30 <= byte < 0x3A
        if free:
            first = -2 if byte >= 256 else -1 if byte == _QUOTE else stale
            return first, 2 if letter else 3 if digit else 5 if byte in _LATE else 4, byte
        if byte in _CLOSERS or byte in _JOINERS:
            return -1, int(byte in _JOINERS), byte
        if byte in _SPACES:
            return stale, 6, byte
        if byte in _LAST:
            return 1, 9, byte
        if digit:
            return stale, 0, _DIGITS.index(byte)
        return stale, 1 if byte == _QUOTE else 4 if byte in _LATE else 3 if letter else 2, byte

    ranked = sorted(found, key=rank)
    if len(ranked) > CHOICES and not wide:  # letters and digits stand for each other where there are many
        kept, kinds = list[int](), dict[tuple[int, int], int]()
        for byte in ranked:
            kind = rank(byte)[:2]
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= 2:
                kept.append(byte)
        ranked = kept[:CHOICES]
    return tuple(ranked)


def _listed(bits: bytes, end: int) -> list[int]:
    """The numbers of the bits that are set, below `end`."""
    number = int.from_bytes(bits, "little")
    return [i for i in range(end) if number >> i & 1] if number else []
