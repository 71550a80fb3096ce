"""Attention of a decoder behind an encoder: over its own tokens, then over what the encoder made (Vaswani et al. 2017).

In the cache of a layer the slots of a sequence's first part, the encoder's tokens, hold the keys and values of cross
attention, those of its second part, the decoder's tokens, their own: both are laid alike, and there is one layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers import attention
from quire.model.mixers.attention import Attention
from quire.model.role import COLUMNS, Role


@dataclass(frozen=True)
class EncoderDecoderAttention(Attention):
    """A `Mixer`. Heads and sizes of cross attention are those of the layer's own."""

    features: frozenset[Feature] = frozenset({known.ENCODER})


def _cross(role: Role) -> Role:
    """Role of the same part of a decoder layer's attention over the encoder's output."""
    return replace(role, where=lambda s, layer: s.encoder_decoder)


ROLES = {f"cross_{name}": _cross(attention.ROLES[name]) for name in ("q", "k", "v", "o")} | {
    "cross_norm": _cross(Role("vector", lambda s: (s.hidden,))),
    "relative_bias": Role(
        "vector", lambda s: (s.encoder.buckets, s.heads), COLUMNS, lambda s: s.heads, layer=False, optional=True
    ),
}
"""Its matrices and vectors on disk, beside those of its own attention. The bias is of distances between own tokens."""
