"""Grammars that an engine could not follow to the end, so that whoever asks for one again costs nobody anything."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from quire.core.errors import GrammarTooComplex, QuireError

KEPT = 4096
"""Grammars that are remembered; the one that was asked for longest ago is forgotten first."""


class RefusedGrammars:
    """Digests of grammars by tenant, each with what was said of it. Any thread may call.

    By tenant, as a grammar may have failed behind what a request's own text said: nobody's grammar is refused for what
    somebody else did with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, QuireError] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, tenant: str, grammar: str, error: QuireError) -> None:
        """`error` ended a request of `tenant` with this `grammar`; only what the grammar is to blame for counts."""
        if not grammar or not isinstance(error, GrammarTooComplex):
            return
        with self._lock:
            self._known[_key(tenant, grammar)] = error
            if len(self._known) > KEPT:
                self._known.popitem(last=False)

    def check(self, tenant: str, grammar: str) -> None:
        """`GrammarTooComplex` where an engine could not follow it for `tenant`."""
        if not self._known:
            return
        key = _key(tenant, grammar)
        with self._lock:
            if (error := self._known.get(key)) is None:
                return
            self._known.move_to_end(key)
        raise GrammarTooComplex(error.message, param=error.param)


def _key(tenant: str, grammar: str) -> bytes:
    """A digest of both."""
    text = f"{len(tenant)} {tenant}{grammar}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


REFUSED = RefusedGrammars()
"""Those of this process."""
