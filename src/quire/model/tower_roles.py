"""What vision towers and projectors have on disk beside attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.role import Role
from quire.model.spec import ModelSpec


def _seen(kind: str, shape: Callable[[ModelSpec], tuple[int, ...]], layer: bool = False) -> Role:
    """A part of a vision tower or projector."""
    return Role(kind, shape, layer=layer, optional=True)


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Between which numbers a matrix is given rows, and between which it leaves what it makes of them."""
BOUNDED = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a layer that may have bounds."""
ROLES = {
    "patch": _seen("linear", lambda s: (s.hidden, 3 * s.patches.frames * s.patches.size**2)),
    "patch_norm": _seen("vector", lambda s: (3 * s.patches.frames * s.patches.size**2,)),
    "patch_out_norm": _seen("vector", lambda s: (s.hidden,)),
    "class_token": _seen("vector", lambda s: (s.hidden,)),
    "attn_scale": _seen("vector", lambda s: (s.hidden,), True),
    "mlp_scale": _seen("vector", lambda s: (s.hidden,), True),
    **{f"{matrix}_{bound}": _seen("vector", lambda s: (1,), True) for matrix in BOUNDED for bound in BOUNDS},
    "std_bias": _seen("vector", lambda s: (s.hidden,)),
    "std_scale": _seen("vector", lambda s: (s.hidden,)),
    "connector_norm": _seen("vector", lambda s: (s.connector.normed,)),
    "connector_merge": _seen("linear", lambda s: (s.connector.width, s.connector.width * s.connector.merge**2)),
    "connector_up": _seen("linear", lambda s: (s.connector.middle, s.connector.read)),
    "connector_mid": _seen("linear", lambda s: (s.connector.middle, s.connector.middle)),
    "connector_down": _seen("linear", lambda s: (s.hidden, s.connector.middle or s.connector.read)),
    "deep_norm": _seen("vector", lambda s: (s.connector.read,), True),
    "deep_up": _seen("linear", lambda s: (s.connector.middle, s.connector.read), True),
    "deep_down": _seen("linear", lambda s: (s.hidden, s.connector.middle), True),
    "newline": _seen("vector", lambda s: (s.hidden,)),
}
