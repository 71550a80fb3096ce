"""What a text that is written of sound may go on with (Radford et al. 2022), as part of a request."""

from __future__ import annotations

import msgspec


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that may not come: `suppress` anywhere, `begin` as the first.

    `times`: the first token that is a time, behind which all others are such; 0 = no times are asked for. Then times
    come in pairs, never fall, and one comes where all of them together are likelier than any word. `initial`: the
    largest that may come first, counted from `times`; -1 = any. `end`: the first token that is no text.
    `untimed`: the token that asks for no times, which never comes.
    """

    suppress: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    times: int = 0
    initial: int = -1
    end: int = 0
    untimed: int = 0
