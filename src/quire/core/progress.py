"""How a long load tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# Called with (done bytes, total bytes, what is being loaded).
LoadProgress = Callable[[int, int, str], None]
