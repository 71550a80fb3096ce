"""Tokenizers whose time is not known to be in proportion to a text: theirs are encoded in a process of its own.

It is started with the first text, has the tokenizer loaded, and forks for each text, which costs some milliseconds.
What exceeds its bounds there is refused, and the next text is encoded as if nothing had been.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers

from quire.core.errors import BadRequest, Unavailable
from quire.text.bounded_process import CpuTimeExceeded, JobProcess, ProcessEnded, Program, ReplyTooLarge, encoded
from quire.text.tokenizer_bounds import check_growth, slow_part

SECONDS, SECONDS_PER_BYTE, MOST_SECONDS = 0.5, 4e-6, 4.0
"""CPU time of a text: tokenizers take some 1e-6 s a byte."""
WALL_SECONDS = 60.0
MEMORY, SHARE = 64 << 20, 1024
"""Bytes of memory that encoding may take, and for each byte of a text: a normal form keeps where each byte was."""
NORMAL_BYTES = 64 << 20
"""Most bytes of a text as it is cut to tokens."""
LARGEST_TEXT = 8 << 20
"""Bytes of a text for which it need not be asked how it grows: a body has no more."""
SHORT = "a"
CHUNK = 16 << 10
"""Characters that are normalized at a time to see how long a text becomes."""
_PROGRAM = Program(
    "the process that encodes texts",
    Path(__file__).with_name("tokenizer_worker.py"),
    ("tokenizers", "quire"),
    (MEMORY, SHARE),
)


def bounded(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`backend`, or what stands for it where texts may grow or take long; `ModelError` names what has no measure."""
    growth, slow = check_growth(backend), slow_part(backend)
    if not slow and growth * LARGEST_TEXT <= NORMAL_BYTES:
        return backend
    return cast(tokenizers.Tokenizer, TokenizerProxy(backend, growth, slow))


class ProxyEncoding(NamedTuple):
    """An encoding as the library's, as far as it is asked for."""

    ids: list[int]
    special_tokens_mask: list[int]
    offsets: list[tuple[int, int]]
    type_ids: list[int]

    def truncate(self, most: int, direction: str = "right") -> None:
        """Leave the first `most` tokens, or the last where what is "left" of them is cut."""
        rows = slice(most, None) if direction == "right" else slice(0, len(self.ids) - most)
        for each in (self.ids, self.special_tokens_mask, self.offsets, self.type_ids):
            del each[rows]


class TokenizerProxy:
    """A `tokenizers.Tokenizer` with other `encode`, `encode_batch_fast` and `normalizer`; all else is the `backend`'s.

    `growth`: times as many bytes as a text has that it may have when it is cut; `slow`: the part that may take long, ""
    = none, and only the length is looked at.
    """

    def __init__(self, backend: tokenizers.Tokenizer, growth: int, slow: str) -> None:
        self._backend, self._growth, self.slow = backend, growth, slow
        self._process: JobProcess | None = None
        self._lock = threading.Lock()
        _ALL.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @property
    def normalizer(self) -> Any:
        """What stands for the backend's."""
        return None if self._backend.normalizer is None else _Normalizer(self)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        """Encode texts as the library does; `BadRequest` for a text that takes too long, or too much memory."""
        if self.slow:
            return [self.encode(text, add_special_tokens) for text in texts]
        for text in texts:
            self._check_length(text)
        return list(self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        """Encode one text, and where its tokens lie in it."""
        self._check_length(text)
        if not self.slow:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ProxyEncoding(**self._ask(text, around=add_special_tokens, normalize=False), type_ids=[])

    def post_process(self, one: Any, other: Any) -> Any:
        """Join a pair as the library does, whose own it need not be: where each text lies is seen of a short one."""
        if not isinstance(one, ProxyEncoding):
            return self._backend.post_process(one, other)
        ids, kinds, last = list[int](), list[int](), None
        whole = self._backend.encode(SHORT, SHORT)
        for token, kind, text in zip(whole.ids, whole.type_ids, whole.sequence_ids, strict=True):
            more = [token] if text is None else [] if text == last else (one, other)[text].ids
            ids, kinds, last = ids + more, kinds + [kind] * len(more), text
        return ProxyEncoding(ids, [], [], kinds)

    def normalize(self, text: str) -> str:
        """The normal form of `text`."""
        self._check_length(text)
        if not self.slow:
            return str(self._backend.normalizer.normalize_str(text))
        return str(self._ask(text, around=False, normalize=True)["text"])

    def _check_length(self, text: str) -> None:
        """Refuse a text that becomes too long; one that may be is measured, a piece at a time."""
        if (
            not isinstance(text, str)
            or self._growth * 4 * len(text) <= NORMAL_BYTES
            or self._backend.normalizer is None
        ):
            return
        if self._growth * len(text.encode(errors="replace")) <= NORMAL_BYTES:
            return
        size = 0
        for at in range(0, len(text), CHUNK):
            chunk = text[at : at + CHUNK]
            normal = (
                self._ask(chunk, False, True)["text"] if self.slow else self._backend.normalizer.normalize_str(chunk)
            )
            size += len(normal.encode(errors="replace"))
            if size > NORMAL_BYTES:
                raise BadRequest(f"the text has more than {NORMAL_BYTES >> 20} MiB when this model's tokenizer has "
                                 "normalized it; make it shorter")  # fmt: skip

    def _ask(self, text: str, around: bool, normalize: bool) -> dict[str, Any]:
        job = {"text": text, "around": around, "normalize": normalize}
        data = encoded(job)
        seconds = min(SECONDS + SECONDS_PER_BYTE * len(data), MOST_SECONDS)
        with self._lock:
            try:
                self._process = self._process or self._begin()
                done = self._process.do(data, seconds, WALL_SECONDS)
            except (TimeoutError, ProcessEnded, CpuTimeExceeded, ReplyTooLarge):
                self.close()
                raise Unavailable(f"{_PROGRAM.name} was ended or hangs; try again") from None
        if done.reply is None:
            what = f"{seconds:.2g} s of CPU time" if done.spent else "memory"
            raise BadRequest(f"the text takes more {'than ' if done.spent else ''}{what} to encode than there is: this "
                             f"model's tokenizer may take for ever at {self.slow}")  # fmt: skip
        if "error" in done.reply:
            raise BadRequest(f"the text cannot be encoded: {done.reply['error']}")
        return dict(done.reply)

    def _begin(self) -> JobProcess:
        process = JobProcess(_PROGRAM)
        weakref.finalize(self, process.close)
        process.exchange(self._backend.to_str().encode("utf-8", "surrogatepass"), WALL_SECONDS, WALL_SECONDS)
        return process

    def close(self) -> None:
        """End the process; another is started with the next text."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def after_fork(self) -> None:
        """Start anew in the child of a fork: start anew, and hold no end of what belongs to the parent."""
        if self._process is not None:
            self._process.forget()
        self._process, self._lock = None, threading.Lock()


class _Normalizer:
    def __init__(self, owner: TokenizerProxy) -> None:
        self._owner = owner

    def normalize_str(self, text: str) -> str:
        return self._owner.normalize(text)

    def __getstate__(self) -> Any:
        return self._owner._backend.normalizer.__getstate__()


_ALL: weakref.WeakSet[TokenizerProxy] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_ALL):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
