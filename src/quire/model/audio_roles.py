"""What an encoder of sound has on disk beside its layers: two convolutions over frames, and positions."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.role import Role
from quire.model.spec import ModelSpec

TAPS = 3
"""Frames that a row of a convolution reads."""


def _heard(shape: Callable[[ModelSpec], tuple[int, ...]]) -> Role:
    return Role("vector", shape, layer=False, optional=True)


ROLES = {
    "encoder_conv1": _heard(lambda s: (s.hidden, s.encoder.bins, TAPS)),
    "encoder_conv2": _heard(lambda s: (s.hidden, s.hidden, TAPS)),
    "encoder_positions": _heard(lambda s: (s.encoder.rows, s.hidden)),
}
"""Kept as f32, whatever the format of other matrices."""
