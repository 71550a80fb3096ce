"""What was won and what was lost: figures of two things side by side, with the change in words."""

from __future__ import annotations

from typing import NamedTuple

SAME = 0.005
"""Changes below this share are no change that a figure of a few digits tells."""


class Change(NamedTuple):
    """A figure before and after. `shown`: both as text; `change`: what became of it; `verdict`: won, lost or ""."""

    name: str
    shown: tuple[str, str]
    change: str
    verdict: str

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table."""
        return (self.name, *self.shown, self.change, self.verdict)


def changed(
    name: str, before: float, after: float, form: str = ",.4g", *, rises: bool = False, least: float = SAME
) -> Change:
    """Compare two figures, of which the higher is better where `rises`.

    `form`: a format of numbers. Changes of a share below `least` are neither won nor lost.
    """
    share = after / before - 1 if before else 0.0
    verdict = "" if abs(share) < least else "won" if (share > 0) is rises else "lost"
    return Change(name, (format(before, form), format(after, form)), f"{share:+.1%}" if before else "", verdict)


def with_text(change: Change, before: str, after: str) -> Change:
    """Show other text for the two figures, as sizes with units."""
    return change._replace(shown=(before, after))
