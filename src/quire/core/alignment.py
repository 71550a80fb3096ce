"""When tokens of a text were said, as part of a request: by the attention of some heads to what an encoder heard."""

from __future__ import annotations

import msgspec


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """`heads`: (decoder layer, head) of those whose attention follows the sound. `first`: the row of the decoder's
    prompt that predicts the first token of the text, whose last row predicts nothing. `rows`: of the encoder's output
    that are sound; what lies behind them is silence."""

    heads: tuple[tuple[int, int], ...]
    first: int
    rows: int
