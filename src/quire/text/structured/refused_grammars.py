"""Grammars that an engine could not follow, so that whoever asks for one again and again costs nobody anything."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import GrammarTooComplex, QuireError

KEPT = 4096
"""Grammars that are remembered; the one that was asked for longest ago is forgotten first."""
FAILURES = 3
"""Failures from which on a grammar is refused: one may be of the text that was drawn, and not of the grammar."""
SECONDS = 600.0
"""For which a failure is remembered."""


@dataclass
class _Failures:
    """Failures of one grammar: how many, what the latest of them said and when that was.

    Not the error itself: once it is raised, its traceback has all that the request's frames hold.
    """

    count: int
    message: str
    param: str | None
    at: float


class RefusedGrammars:
    """Digests of grammars by tenant, each with what was said of it. Any thread may call.

    By tenant, as a grammar may have failed behind what a request's own text said: nobody's grammar is refused for what
    somebody else did with it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._known: OrderedDict[bytes, _Failures] = OrderedDict()

    def note(self, tenant: str, grammar: str, error: QuireError) -> None:
        """`error` ended a request of `tenant` with this `grammar`; only what the grammar is to blame for counts."""
        if not grammar or not isinstance(error, GrammarTooComplex):
            return
        key = _key(tenant, grammar)
        with self._lock:
            known = self._live(key)
            count = 1 if known is None else known.count + 1
            self._known[key] = _Failures(count, error.message, error.param, self._clock())
            if len(self._known) > KEPT:
                self._known.popitem(last=False)

    def check(self, tenant: str, grammar: str) -> None:
        """`GrammarTooComplex` where an engine could not follow it for `tenant`, several times and lately."""
        if not self._known:
            return
        with self._lock:
            known = self._live(_key(tenant, grammar))
        if known is not None and known.count >= FAILURES:
            raise GrammarTooComplex(known.message, param=known.param)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._known.clear()

    def _live(self, key: bytes) -> _Failures | None:
        """What is remembered, which is the latest that was asked for now."""
        known = self._known.get(key)
        if known is not None and self._clock() - known.at > SECONDS:
            del self._known[key]
            return None
        if known is not None:
            self._known.move_to_end(key)
        return known


def _key(tenant: str, grammar: str) -> bytes:
    """A digest of both."""
    text = f"{len(tenant)} {tenant}{grammar}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


REFUSED = RefusedGrammars()
"""Those of this process."""
