"""Tokens to text as they come: never half a character, never a part of a stop string that may still complete.
See docs/design/text.md."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

from quire.core.params import SamplingParams
from quire.core.request import FinishReason, Output
from quire.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
"""Tokens held back at most for a character that does not complete."""
_CHARACTER = 4
"""Bytes, and so tokens, of the longest character in UTF-8."""
_BEFORE = 8
"""Tokens of the prompt that its continuation is decoded behind: a decoder treats the first of a text differently."""


class Detokenizer(Protocol):
    """`push` returns the text that is certain after more tokens, `flush` the rest; together they are the whole text."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """Detokenizer for byte-level tokenizers: concatenated bytes through an incremental UTF-8 decoder. Exact, O(1) per
    token.

    `prompt`: the tokens before; a character that they begin belongs to what follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.push(_last(tokenizer, prompt, skip_special_tokens, shown))

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        tokenizer = self._tokenizer
        return self._decoder.decode(
            b"".join(tokenizer.id_to_bytes(i) for i in _unskipped(tokenizer, ids, self._skip, self._shown))
        )

    def flush(self) -> str:
        """What is left: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decode a short window with and without the new tokens, and emit the difference.

    The window starts one emission back, at first with the last tokens of `prompt`, so that a decoder that treats the
    first token of a text differently (leading space of SentencePiece) sees the same first token both times.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = shown
        self._spaces = spaces_between_special_tokens
        self._window = _last(tokenizer, prompt, skip_special_tokens, shown)
        self._read = len(self._window) - _unfinished(tokenizer, self._window)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip and not self._shown, self._spaces)

    def _emit(self, end: int) -> str:
        """The text of the window's unread tokens up to `end`, which become the context of the next ones."""
        before, text = self._decode(self._window[: self._read]), self._decode(self._window[:end])
        new = text[len(before) :] if text.startswith(before) else self._decode(self._window[self._read : end])
        if new:
            self._window = self._window[self._read :]
            end -= self._read
        self._read = end
        return new

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now; a trailing U+FFFD may be half a character and waits."""
        self._window += _unskipped(self._tokenizer, ids, self._skip, self._shown)
        end = len(self._window)
        if end == self._read:
            return ""
        cuts = range(end, max(self._read, end - _CHARACTER), -1)
        texts = {}
        for cut in cuts:
            texts[cut] = self._decode(self._window[:cut])
            if not texts[cut].endswith(_REPLACEMENT):
                return self._emit(cut)
        if end - self._read <= _MAX_PENDING:
            return ""
        # Garbage, or U+FFFD that is meant: the latter has fewer characters than tokens where it is whole.
        return self._emit(min(cuts, key=lambda cut: len(texts[cut])))

    def flush(self) -> str:
        """What is left, unfinished characters included."""
        return self._emit(len(self._window))


def _unskipped(tokenizer: Tokenizer, ids: Sequence[int], skip: bool, shown: frozenset[int]) -> Sequence[int]:
    return [i for i in ids if i in shown or not tokenizer.is_special(i)] if skip else ids


def _last(tokenizer: Tokenizer, prompt: Sequence[int], skip: bool, shown: frozenset[int]) -> list[int]:
    """The last tokens of `prompt` that have a text, from the beginning of a character on."""
    found: list[int] = []
    for i in reversed(prompt):
        if len(found) >= _BEFORE + _CHARACTER or (len(found) >= _BEFORE and not _goes_on(tokenizer, found[-1])):
            break
        if tokenizer.id_to_bytes(i) and (not skip or i in shown or not tokenizer.is_special(i)):
            found.append(i)
    return found[::-1]


def _goes_on(tokenizer: Tokenizer, token: int) -> bool:
    """Whether the token begins within a character."""
    return tokenizer.id_to_bytes(token)[0] & 0xC0 == 0x80


def _unfinished(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many tokens at the end of `ids` have a part in a character that is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(map(tokenizer.id_to_bytes, ids)))
    left, count = len(decoder.getstate()[0]), 0
    while left > 0:
        count += 1
        left -= len(tokenizer.id_to_bytes(ids[-count]))
    return count


def detokenizer(
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
    prompt: Sequence[int] = (),
) -> Detokenizer:
    """The detokenizer for what follows `prompt`: the prompt's text and what it returns are the text of all tokens."""
    if tokenizer.byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens, shown, prompt)
    return WindowDetokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens, shown, prompt)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` behind `prompt`, without special tokens."""
    text = detokenizer(tokenizer, True, prompt=prompt)
    return text.push(ids) + text.flush()


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The text of a prompt that is continued, with special tokens, without a character that it only begins."""
    unfinished = _unfinished(tokenizer, _last(tokenizer, prompt, False, frozenset()))
    if unfinished and tokenizer.byte_level:
        return tokenizer.decode(prompt, skip_special_tokens=False).removesuffix(_REPLACEMENT)
    return tokenizer.decode(prompt[: len(prompt) - unfinished], skip_special_tokens=False)


class Offsets:
    """Where tokens begin in the text that `detokenizer` makes of them; `start`: characters before them."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._at = start

    def push(self, ids: Sequence[int]) -> list[int]:
        """The characters before each of `ids`. Tokens of one character begin where that does."""
        found = []
        for i in ids:
            found.append(self._at)
            self._at += len(self._detokenizer.push([i]))
        return found


class StopStrings:
    """Watches a growing text for the first of several strings to be completed.

    The one that ends first wins, among equals the longest: what a character-by-character reader would see, so the
    result does not depend on how the text was cut into pieces. Strings of `special` have special tokens in them and
    are found in a text with those that are hidden, the others in what is seen.
    """

    def __init__(self, stops: tuple[str, ...], include: bool, special: frozenset[str] = frozenset()) -> None:
        self._stops = stops
        self._include = include
        self._special = special
        self._held = ""
        self._seen = b""
        """Of each character held whether it is seen (1) or hidden (0)."""

    def push(self, text: str, final: bool, hidden: bool = False) -> tuple[str, str | None]:
        """Text to show now, and the stop string if one is complete; a possible beginning of one is held back."""
        if not self._stops:
            return "" if hidden else text, None
        text, seen = self._held + text, self._seen + bytes([not hidden]) * len(text)
        views = list(self._views(text, seen))
        hits = [
            (places[at + len(stop) - 1], places[at], stop)
            for stop, view, places in views
            if (at := view.find(stop)) >= 0
        ]
        if hits:
            _, start, stop = min(hits)
            return "".join(compress(text[:start], seen)) + (stop if self._include else ""), stop
        keep = len(text)
        for stop, view, places in () if final else views:
            overlap = self._overlap(view, stop)
            keep = min(keep, places[len(view) - overlap]) if overlap else keep
        self._held, self._seen = text[keep:], seen[keep:]
        return "".join(compress(text[:keep], seen)), None

    def _views(self, text: str, seen: bytes) -> Iterator[tuple[str, str, Sequence[int]]]:
        """Each stop string, the text that it is looked for in, and where in `text` the characters of that are."""
        whole = range(len(text))
        visible, places = (text, whole) if 0 not in seen else ("".join(compress(text, seen)), [*compress(whole, seen)])
        for stop in self._stops:
            yield (stop, text, whole) if stop in self._special else (stop, visible, places)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of `stop`."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return 0 if at < 0 else len(text) - at


class TextStream:
    """The text of one sequence's output. Push its tokens, without the one that ended it unless that shall be shown.

    `prompt`: the tokens that are continued; `shown`: special tokens that are text although others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
        self._tokenizer, self._shown = tokenizer, shown
        self._detokenizer = detokenizer(tokenizer, skip, spaces, shown, prompt)
        special = frozenset(stop for stop in params.stop if skip and tokenizer.has_special(stop))
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output, special)
        self._hidden = bool(special)
        self._unchecked = params.min_tokens
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int], final: bool = False) -> tuple[str, str | None]:
        """New text to show, and the stop string that ended it, if any; after that nothing more comes.

        `final`: no more tokens will come, so nothing is held back any longer.
        """
        parts = [[i] for i in ids] if self._hidden else [ids]
        text = ""
        for i, part in enumerate(parts or [[]], 1):
            if self.stopped_by is None:
                text += self._push(part, final and i >= len(parts))
        return text, self.stopped_by

    def _push(self, ids: Sequence[int], final: bool) -> str:
        text = self._detokenizer.push(ids)
        if final:
            text += self._detokenizer.flush()
        if self._unchecked > 0:  # stop strings count only in what follows the first `min_tokens` tokens
            self._unchecked -= len(ids)
            return text
        hidden = bool(self._hidden and ids and not _unskipped(self._tokenizer, ids, True, self._shown))
        text, self.stopped_by = self._stops.push(text, final and not hidden)
        if hidden and self.stopped_by is None:
            special = self._tokenizer.id_to_text(ids[0])
            more, self.stopped_by = self._stops.push(special, final, hidden=True)
            text += more
        return text


class Growth(NamedTuple):
    """What an output adds to a sequence: `text`, and the first `used` of its tokens.

    `stop_reason`: the stop string or stop token, None for the model's own end token.
    """

    text: str
    used: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class OutputText:
    """One sequence's text as the engine's outputs come; none where there is no `tokenizer`.

    The engine knows no stop strings: its "stop" means that the last token ended the text, and is no part of it unless
    that was asked for, or a grammar ended with it. `prompt`: the tokens that are continued. `shown`: special tokens
    that are text although others are skipped, as markers of calls are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._params = params
        self._stream = None if tokenizer is None else TextStream(tokenizer, params, shown, prompt)

    def push(self, output: Output) -> Growth:
        """Push text with stop strings token by token, so that the end does not depend on how outputs were merged."""
        if self._stream is None:
            return Growth("", len(output.tokens), output.finish_reason, output.stop_token)
        shown, last, text, used = output.tokens, output.finish_reason is not None, "", 0
        if output.finish_reason == "stop" and not (self._params.include_stop_str_in_output or output.complete):
            shown = shown[:-1]
        parts = [[token] for token in shown] if self._params.stop else [shown]
        for i, part in enumerate(parts or [[]], 1):
            new, stopped = self._stream.push(part, final=last and i >= len(parts))
            text += new
            used += len(part)
            if stopped is not None:
                return Growth(text, used, "stop", stopped)
        return Growth(text, len(output.tokens), output.finish_reason, output.stop_token)
