"""Where a decoder's layers find their weights: they are there, or they come while the layers before them run."""

from __future__ import annotations

from typing import Protocol


class LayerSource(Protocol):
    """Whoever walks over layers says before and after each that it does; in any order, one walk at a time.

    Both are ops of the step, or queue work beside its ops: a recorded step waits where the recorded one did.
    """

    @property
    def recordable(self) -> bool:
        """Whether steps may be recorded or captured with it."""
        ...

    def before(self, layer: int) -> None:
        """The weights of `layer` are there when the ops that follow run."""
        ...

    def after(self, layer: int) -> None:
        """No op that follows reads the weights of `layer`, until `before` is called for it again."""
        ...


class Resident:
    """All weights are in memory."""

    recordable = True

    def before(self, layer: int) -> None:
        """Nothing to wait for."""

    def after(self, layer: int) -> None:
        """Nothing to give back."""
