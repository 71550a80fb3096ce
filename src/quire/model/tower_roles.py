"""What vision towers and projectors have on disk beside attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.role import Role
from quire.model.spec import ModelSpec


def _seen(kind: str, shape: Callable[[ModelSpec], tuple[int, ...]], layer: bool = False) -> Role:
    """A part of a vision tower or projector."""
    return Role(kind, shape, layer=layer, optional=True)


ROLES = {
    "patch": _seen("linear", lambda s: (s.hidden, 3 * s.patches.frames * s.patches.size**2)),
    "class_token": _seen("vector", lambda s: (s.hidden,)),
    "attn_scale": _seen("vector", lambda s: (s.hidden,), True),
    "mlp_scale": _seen("vector", lambda s: (s.hidden,), True),
    "connector_norm": _seen("vector", lambda s: (s.connector.normed,)),
    "connector_merge": _seen("linear", lambda s: (s.connector.width, s.connector.width * s.connector.merge**2)),
    "connector_up": _seen("linear", lambda s: (s.connector.middle, s.connector.read)),
    "connector_down": _seen("linear", lambda s: (s.hidden, s.connector.middle or s.connector.read)),
    "deep_norm": _seen("vector", lambda s: (s.connector.read,), True),
    "deep_up": _seen("linear", lambda s: (s.connector.middle, s.connector.read), True),
    "deep_down": _seen("linear", lambda s: (s.hidden, s.connector.middle), True),
    "newline": _seen("vector", lambda s: (s.hidden,)),
}
