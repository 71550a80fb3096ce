"""Sizes of the encoder's stack of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_BLOCKS = 128
"""Tokens of the largest block: rows of an encoder that are always as many are given room up to a whole one."""


@dataclass(frozen=True)
class EncoderStack:
    """The encoder's stack of an encoder-decoder (Raffel et al. 2020): `layers` of the decoder's widths, 0 = there is
    none.

    Where it reads tokens, scores of both stacks get a number per head by the bucket of the distance between query and
    key: `buckets` of them, the last for `furthest` tokens and more. `start`: the token that the decoder begins with, if
    generation_config.json names no other.

    Where it reads sound (Radford et al. 2022) it makes `rows` of twice as many frames of `bins` numbers; 0 = it does
    not.
    """

    layers: int = 0
    buckets: int = 0
    furthest: int = 0
    start: int = 0
    rows: int = 0
    bins: int = 0

    @property
    def room(self) -> int:
        """Tokens of a sequence that are the encoder's and not of the positions of the decoder."""
        return -(-self.rows // WHOLE_BLOCKS) * WHOLE_BLOCKS


NO_ENCODER = EncoderStack()
