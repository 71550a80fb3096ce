"""What a sequence may say next so that it follows its grammar, and so that it comes to an end in time.
See docs/design/structured-output.md.

Each guide keeps a *completion*: tokens with which what was said so far would be complete, never more than there are
tokens left. A token that was drawn is taken if there is again such a completion behind it; if not it is refused and
another is drawn, and when no token is left over, only the completion's next one may come. So a text is complete and
valid within `max_tokens`, whatever the model wants.

All of it is a function of the tokens said, the grammar and `max_tokens`: not of time, nor of what else runs, nor of
tokens that were refused or guessed. So a guide can be made again from the tokens. One bound alone is of time: a
sequence whose long work exceeds `MOST_SECONDS` ends with an error, as a grammar that takes too long to read does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from quire.core.errors import BadRequest, GrammarTooComplex
from quire.text.structured.completion_search import LATER, LIMITS, byte_tokenizer, hints_of, shortest
from quire.text.structured.vocabulary import Vocabulary

Mask = NDArray[np.int32]
TAILS = 4
"""Tokens that may have been left out of a completion by what was said instead of them."""
FAILURES = 4
"""Times that a sequence may come to what a matcher cannot do within its limits."""


SLOW, MOST_SECONDS = 4e-3, 0.3
"""CPU time of work on a token that is long, and of all that is long for a sequence. Ordinary schemas have no such work;
the dearest of 300 models as people's tools write them has 0.1 s of it."""
RISE, FALL = 0.5, 0.1
"""How fast `GrammarGuide.seconds` follows what was measured."""


class _Stand(NamedTuple):
    """Where a sequence stands after a token: it is complete with `tokens` from `start` on. `over`: it can only end."""

    tokens: tuple[int, ...]
    start: int
    over: bool
    accepts: bool

    @property
    def need(self) -> int:
        """How many tokens that is."""
        return len(self.tokens) - self.start

    @property
    def rest(self) -> tuple[int, ...]:
        return self.tokens[self.start :]


class Grammar:
    """A grammar made ready for a vocabulary; guides of it are copies, each for one sequence and one thread at a time.

    `BadRequest` when it does not compile, which an edge that checked it knows before. `spent`: one of the copies came
    to its limits, by what it read and by what all others did.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.hints = vocabulary, hints_of(text)
        self._text, self.spent = text, False
        self._by_token = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
        self._bytes = byte_tokenizer(list(vocabulary.special))
        self._by_byte = LLMatcher(self._bytes, text, log_level=0, limits=LIMITS)
        for matcher in (self._by_token, self._by_byte):
            if matcher.is_error():
                raise BadRequest(f"structured_outputs: {matcher.get_error()[:300]}", param="structured_outputs")

    def matchers(self) -> tuple[LLMatcher, LLMatcher]:
        """Matchers of tokens and of bytes, at the beginning."""
        return self._by_token.deep_copy(), self._by_byte.deep_copy()

    def renewed(self) -> Grammar:
        """Another in its place. Copies share what they made of the grammar as they read, and its bounds: whatever one
        of them did, the others must go on as if it had not been."""
        self.spent = True
        return Grammar(self._text, self.vocabulary)


class GuideCost:
    """What work on a sequence costs others who are in the same steps.

    `turn` is of `quire.features.structured_output.plan_structured_output`.
    """

    def __init__(self) -> None:
        self.seconds, self.turn, self._spent = 0.0, 0, 0.0

    def took(self, seconds: float) -> None:
        """Note the CPU time of work on a token, of its mask or of reading it; `GrammarTooComplex` for too much."""
        self.seconds += (RISE if seconds > self.seconds else FALL) * (seconds - self.seconds)
        if seconds > SLOW:
            self._spent += seconds
            if self._spent > MOST_SECONDS:
                raise _too_complex(f"what is long takes more than {MOST_SECONDS:g} s of CPU time, and others wait")


class GrammarGuide(GuideCost):
    """Guide of one sequence, which may have `most` tokens and ends by one of `ends`; `completion` is one of the empty
    text.

    `path` are the tokens it has read: those said, and perhaps some of a draft behind them.
    """

    def __init__(self, grammar: Grammar, most: int, ends: Iterable[int], completion: Sequence[int]) -> None:
        super().__init__()
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._most, self._ends, self._first = most, frozenset(ends), tuple(completion)
        self._usable = self._vocabulary.usable(self._ends)
        self._by_token, self._by_byte = grammar.matchers()
        self._spelled = [0]  # byte tokens up to each token of the path, as far as the matcher of bytes may have read
        self._read = 0
        self.path: list[int] = []
        self._list: list[int] | None = None
        self._known = self._failures = 0
        accepts = self._by_token.is_accepting()
        self._stands = [_Stand(tuple(completion), 0, self._over(accepts), accepts)]

    def anew(self) -> GrammarGuide:
        """Make a guide of the same grammar that stands at the beginning."""
        return GrammarGuide(self._grammar, self._most, self._ends, self._first)

    # ------------------------------------------------------------------------------------------------- along the path

    def follow(self, tokens: list[int], start: int, drafted: Sequence[int] = ()) -> bool:
        """Stand behind `tokens` from `start` on and `drafted`; whether all of that is taken.

        `tokens` is one list that only grows, of which what was compared once is not looked at again.
        """
        if tokens is not self._list:
            self._list, self._known = tokens, 0
        made = len(tokens) - start
        same = min(self._known, len(self.path))
        while same < min(made, len(self.path)) and self.path[same] == tokens[start + same]:
            same += 1
        if same < made:
            self._back(same)
            for token in tokens[start + same :]:
                if not self._take(token):
                    return False
            self._known = same = made
        self._known = same
        for token in drafted:
            if same == len(self.path) or self.path[same] != token:
                self._back(same)
                if not self._take(token):
                    return False
            same += 1
        self._back(same)
        return True

    def may(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar allows behind the path."""
        return int(self._by_token.validate_tokens(list(tokens))) if tokens else 0

    def takes(self, token: int) -> bool:
        """Read a token that was drawn, unless what is left does not suffice to complete the text behind it.

        An end is not read: where it may come is said by the mask.
        """
        stand = self._stands[-1]
        return token in self._ends or stand.over or self._take(token)

    def complete(self, made: int) -> bool:
        """Whether nothing may follow the first `made` tokens but an end."""
        return made < len(self._stands) and self._stands[made].over

    @property
    def completion(self) -> tuple[int, ...]:
        """Tokens that complete the text here."""
        return self._stands[-1].rest

    # ------------------------------------------------------------------------------------------------------- of a row

    def mask(self, bits: Mask) -> None:
        """Set the bits, [words] of 32 ids each, of all tokens that may come next; the rest is 0.

        Where nothing but an end may come and the model has none, all may: the sequence has ended already.
        """
        stand = self._stands[-1]
        if stand.over:
            bits[:] = 0 if self._ends else -1
        elif self._left <= stand.need:
            bits[:] = 0
            self._set(bits, stand.rest[:1])
            return
        else:
            self._by_token.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._restore():
                self._by_token.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                if self._restore():
                    self._fail()
                    bits[:] = 0
                    self._set(bits, stand.rest[:1])
        if stand.accepts:
            self._set(bits, self._ends)
        else:
            for token in self._ends:
                bits[token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).astype(np.int32))

    @property
    def only(self) -> list[int]:
        """The tokens that complete the text, of which one must come when others are refused too often."""
        stand = self._stands[-1]
        return list(stand.rest[:1]) or sorted(self._ends)

    def forced(self) -> list[int]:
        """Tokens that must follow, as the tokenizer would write them; none where that is not known."""
        stand = self._stands[-1]
        if stand.over:
            return []
        if self._left <= stand.need:
            return list(stand.rest)
        return list(self._by_token.compute_ff_tokens())

    # --------------------------------------------------------------------------------------------------------- inside

    def _over(self, accepts: bool) -> bool:
        """Whether only an end may follow here; without a token for that, a text ends where it first is complete."""
        return bool(self._by_token.is_stopped() or (accepts and not self._ends))

    @property
    def _left(self) -> int:
        return self._most - len(self.path)

    @staticmethod
    def _set(bits: Mask, tokens: Iterable[int]) -> None:
        view = bits.view(np.uint32)
        for token in tokens:
            view[token >> 5] |= np.uint32(1 << (token & 31))

    def _take(self, token: int) -> bool:
        taken, gave_up = self._tried(token)
        if gave_up:
            taken, gave_up = self._tried(token)
            if gave_up:
                self._fail()
        return taken

    def _tried(self, token: int) -> tuple[bool, bool]:
        """Whether `token` is taken; if not, whether that is as the matcher gave up, which a new one has replaced."""
        stand = self._stands[-1]
        if stand.over or not self._left or not self._by_token.try_consume_tokens([token]):
            return False, self._restore()
        self.path.append(token)
        found = self._behind(token, stand)
        if found is None or self._by_token.is_error():
            self.path.pop()
            gave_up = self._restore()
            if not gave_up:
                self._by_token.rollback(1)
            return False, gave_up
        self._stands.append(found)
        return True, False

    def _behind(self, token: int, stand: _Stand) -> _Stand | None:
        """Where the sequence stands after `token`, which was read; None: it could not be completed in time."""
        accepts = self._by_token.is_accepting()
        if self._over(accepts):
            return _Stand((), 0, True, True)
        if accepts:
            return _Stand((), 0, False, True)
        if stand.need and token == stand.tokens[stand.start]:
            return _Stand(stand.tokens, stand.start + 1, False, False)
        found = self._tail(token, stand)
        if found is None or found.need > self._left:
            found = self._searched()
        return found if found is not None and found.need <= self._left else None

    def _tail(self, token: int, stand: _Stand) -> _Stand | None:
        """What is left of the completion before, where that completes the text still."""
        end = [self._vocabulary.end]
        for start in range(stand.start, min(stand.start + TAILS, len(stand.tokens))):
            tokens = list(stand.tokens[start:])
            if self._by_token.validate_tokens(tokens + end) == len(tokens) + 1:
                return _Stand(stand.tokens, start, False, False)
        said = self._vocabulary.spelled(token)
        spelled = [b for t in stand.rest[: len(said)] for b in self._vocabulary.spelled(t)]
        if spelled[: len(said)] == said:
            spelled = [b for t in stand.rest for b in self._vocabulary.spelled(t)]
            return self._proven(spelled[len(said) :])
        return None

    def _searched(self) -> _Stand | None:
        """A completion found anew; the second time by a matcher that has read nothing else."""
        end, spelled = 256 + len(self._vocabulary.special), None
        for _ in range(2):
            if self._catch_up():
                spelled = shortest(self._by_byte, end, LATER, self._usable, self._grammar.hints)
                if not self._by_byte.is_error():
                    break
            self._grammar = self._grammar.renewed()
            self._by_byte, self._read, self._spelled = self._grammar.matchers()[1], 0, [0]
        return None if spelled is None else self._proven(spelled)

    def _proven(self, spelled: list[int]) -> _Stand | None:
        """Give these bytes in tokens, if they complete the text."""
        tokens = self._vocabulary.fewest(spelled, self._ends)
        if tokens is None or self._by_token.validate_tokens([*tokens, self._vocabulary.end]) != len(tokens) + 1:
            return None
        return _Stand(tuple(tokens), 0, False, False)

    def _catch_up(self) -> bool:
        """Have the matcher of bytes read the path."""
        more = [b for token in self.path[self._read :] for b in self._vocabulary.spelled(token)]
        if not self._by_byte.consume_tokens(more):
            return False
        for token in self.path[self._read :]:
            self._spelled.append(self._spelled[-1] + len(self._vocabulary.spelled(token)))
        self._read = len(self.path)
        return True

    def _back(self, length: int) -> None:
        """Stand behind the first `length` tokens of the path."""
        gone = len(self.path) - length
        if gone:
            self._by_token.rollback(gone)
            del self.path[length:], self._stands[length + 1 :]
        if self._read > length:
            self._unread(length)

    def _unread(self, length: int) -> None:
        self._by_byte.rollback(self._spelled[self._read] - self._spelled[length])
        del self._spelled[length + 1 :]
        self._read = length

    def _restore(self) -> bool:
        """Whether the matcher of tokens had given up; then there is one that has read the path and nothing else.

        So what it does then depends on the path alone: it has room for all that one has which did more.
        """
        if not self._by_token.is_error():
            return False
        self._grammar = self._grammar.renewed()
        self._by_token, self._by_byte = self._grammar.matchers()
        self._read, self._spelled = 0, [0]
        if not self._by_token.consume_tokens(self.path):
            raise _too_complex(self._by_token.get_error(), len(self.path))
        return True

    def _fail(self) -> None:
        self._failures += 1
        if self._failures > FAILURES:
            raise _too_complex(self._by_token.get_error(), len(self.path))


def _too_complex(error: str, behind: int | None = None) -> GrammarTooComplex:
    reason = (error or "its matcher comes to its limits").split("\n")[0]
    place = "" if behind is None else f" behind {behind} tokens of its text"
    return GrammarTooComplex(
        f"structured_outputs: the grammar is too complex to be followed{place}: {reason[:200]}; make it simpler, "
        "with fewer repetitions within repetitions",
        param="structured_outputs",
    )
