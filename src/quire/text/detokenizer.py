"""Tokens to text as they come: never half a character, never a part of a stop string that may still complete."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.core.params import SamplingParams
from quire.core.request import FinishReason, Output
from quire.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
"""Tokens held back at most for a character that does not complete."""
_CHARACTER = 4
"""Bytes, and so tokens, of the longest character in UTF-8."""


class Detokenizer(Protocol):
    """`push` returns the text that is certain after more tokens, `flush` the rest; together they are the whole text."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """For byte-level tokenizers: concatenated bytes through an incremental UTF-8 decoder. Exact, O(1) per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

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
    """For any tokenizer: decode a short window with and without the new tokens, and emit the difference.

    The window starts one emission back, so that a decoder that treats the first token of a text differently (leading
    space of SentencePiece) sees the same first token both times.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = shown
        self._spaces = spaces_between_special_tokens
        self._window: list[int] = []
        self._read = 0

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


class StopStrings:
    """Watches a growing text for the first of several strings to be completed.

    The one that ends first wins, among equals the longest: what a character-by-character reader would see, so the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, final: bool) -> tuple[str, str | None]:
        """Text to show now, and the stop string if one is complete; a possible beginning of one is held back."""
        if not self._stops:
            return text, None
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, start, stop = min(hits)
            return text[: end if self._include else start], stop
        keep = 0 if final else max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of `stop`."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return 0 if at < 0 else len(text) - at


class TextStream:
    """The text of one sequence's output. Push its tokens, without the one that ended it unless that shall be shown."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, shown: frozenset[int] = frozenset()) -> None:
        skip = params.skip_special_tokens
        self._detokenizer: Detokenizer = (
            ByteDetokenizer(tokenizer, skip, shown)
            if tokenizer.byte_level
            else WindowDetokenizer(tokenizer, skip, params.spaces_between_special_tokens, shown)
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._unchecked = params.min_tokens
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int], final: bool = False) -> tuple[str, str | None]:
        """New text to show, and the stop string that ended it, if any; after that nothing more comes.

        `final`: no more tokens will come, so nothing is held back any longer.
        """
        if self.stopped_by is not None:
            return "", self.stopped_by
        text = self._detokenizer.push(ids)
        if final:
            text += self._detokenizer.flush()
        if self._unchecked > 0:  # stop strings count only in what follows the first `min_tokens` tokens
            self._unchecked -= len(ids)
            return text, None
        text, self.stopped_by = self._stops.push(text, final)
        return text, self.stopped_by


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
    that was asked for, or a grammar ended with it. `shown`: special tokens that are text although others are skipped,
    as markers of calls are.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, shown: frozenset[int] = frozenset()
    ) -> None:
        self._params = params
        self._stream = None if tokenizer is None else TextStream(tokenizer, params, shown)

    def push(self, output: Output) -> Growth:
        """With stop strings token by token, so that the end does not depend on how outputs were merged."""
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
