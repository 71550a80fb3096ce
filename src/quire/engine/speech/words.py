"""Times of words, from the times of their tokens, as openai/whisper has them (whisper/timing.py)."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire.engine.speech.transcript import Word
from quire.text.tokenizer import Tokenizer

TOGETHER = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages without spaces between words: each character is timed."""
OPENING, CLOSING = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
"""Punctuation that belongs to the word behind it, and to that before it."""
SENTENCE_ENDS = ".。!！?？"  # noqa: RUF001
LONGEST = 0.7
"""Seconds of a usual word at most; one twice as long as the usual one is cut where a sentence ends or a pause is."""
UNKNOWN = "\ufffd"


@dataclass(slots=True)
class SpokenWord:
    """A word of a window, in seconds from its beginning, and how many tokens it is."""

    text: str
    tokens: int
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


@dataclass(slots=True)
class WordTimes:
    """The words of a sound, window by window. `said`: when the last one ended, in seconds of the sound."""

    tokenizer: Tokenizer
    language: str
    said: float = 0.0

    def add(
        self,
        parts: Sequence[Sequence[int]],
        spans: Sequence[tuple[float, float]],
        starts: Sequence[float],
        offset: float,
    ) -> list[tuple[Word, ...]]:
        """The words of each segment of a window, whose tokens of text are `parts` and whose times are `spans`.

        `starts`: when each token of all parts begins, and when the last one ends, in seconds from the window's
        beginning, which is at `offset`.
        """
        tokens = [token for part in parts for token in part]
        words = split_words(self.tokenizer, tokens, self.language in TOGETHER)
        at = 0
        for word in words:
            word.start, word.end = starts[at], starts[at + word.tokens]
            at += word.tokens
        seconds = [word.seconds for word in words if word.seconds]
        usual = min(LONGEST, float(np.median(seconds))) if seconds else 0.0
        if seconds:
            _cut_at_sentence_ends(words, 2 * usual)
        join_punctuation(words)
        found, taken = list[tuple[Word, ...]](), 0
        for part, span in zip(parts, spans, strict=True):
            own, count = list[SpokenWord](), 0
            while taken < len(words) and count < len(part):
                word = words[taken]
                if word.text:
                    times = (round(offset + each, 2) for each in (word.start, word.end))
                    own.append(SpokenWord(word.text, word.tokens, *times))
                count += word.tokens
                taken += 1
            if own:
                self._fit(own, span, usual)
            found.append(tuple(Word(word.text, round(word.start, 3), round(word.end, 3)) for word in own))
        return found

    def _fit(self, words: list[SpokenWord], span: tuple[float, float], usual: float) -> None:
        """Cut what is too long behind a pause, and at the ends of the segment, which says them better then."""
        longest, first, last = 2 * usual, words[0], words[-1]
        second = words[1] if len(words) > 1 else None
        if first.end - self.said > 4 * usual and (
            first.seconds > longest or (second is not None and second.end - first.start > 2 * longest)
        ):
            if second is not None and second.seconds > longest:
                first.end = second.start = max(second.end / 2, second.end - longest)
            first.start = max(0.0, first.end - longest)
        if span[0] < first.end and span[0] - 0.5 > first.start:
            first.start = max(0.0, min(first.end - usual, span[0]))
        if span[1] > last.start and span[1] + 0.5 < last.end:
            last.end = max(last.start + usual, span[1])
            self.said = span[1]
        else:
            self.said = last.end


def split_words(tokenizer: Tokenizer, tokens: Sequence[int], together: bool) -> list[SpokenWord]:
    """Words of tokens of text: at spaces and before punctuation, or, `together`, after each whole character."""
    whole = tokenizer.decode(list(tokens))
    pieces, own, at = list[SpokenWord](), list[int](), 0
    for token in tokens:
        own.append(token)
        text = tokenizer.decode(own)
        broken = text.find(UNKNOWN)
        if broken < 0 or whole[at + broken : at + broken + 1] == UNKNOWN:
            pieces.append(SpokenWord(text, len(own)))
            own, at = [], at + len(text)
    if own:  # bytes that are no character
        pieces.append(SpokenWord(tokenizer.decode(own), len(own)))
    if together:
        return pieces
    words = list[SpokenWord]()
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in string.punctuation:
            words.append(piece)
        else:
            words[-1].text += piece.text
            words[-1].tokens += piece.tokens
    return words


def join_punctuation(words: list[SpokenWord]) -> None:
    """Give what opens to the word behind it and what closes to that before it; what gave all has no text left."""
    behind = len(words) - 1
    for at in range(len(words) - 2, -1, -1):
        if words[at].text.startswith(" ") and words[at].text.strip() in OPENING:
            _give(words[at], words[behind], words[at].text + words[behind].text)
        else:
            behind = at
    before = 0
    for at in range(1, len(words)):
        if not words[before].text.endswith(" ") and words[at].text in CLOSING:
            _give(words[at], words[before], words[before].text + words[at].text)
        else:
            before = at


def _give(giver: SpokenWord, taker: SpokenWord, text: str) -> None:
    taker.text, taker.tokens = text, taker.tokens + giver.tokens
    giver.text, giver.tokens = "", 0


def _cut_at_sentence_ends(words: Sequence[SpokenWord], longest: float) -> None:
    """Shorten words beside the end of a sentence, where silence is counted to them."""
    for before, word in pairwise(words):
        if word.seconds > longest:
            if word.text in SENTENCE_ENDS:
                word.end = word.start + longest
            elif before.text in SENTENCE_ENDS:
                word.start = word.end - longest
