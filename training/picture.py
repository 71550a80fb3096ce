"""Draws the loss curves and the exactness."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_losses(history: list[dict[str, float | str]], path: Path) -> None:
    """Save a picture of a run's history."""
    figure, losses = pyplot.subplots(figsize=(9, 5))
    shares = losses.twinx()
    for kind, axis, style in (
        ("code", losses, "-"),
        ("questions", losses, "-"),
        ("heldout", losses, "o-"),
        ("exact", shares, "k--"),
    ):
        rows = [row for row in history if row["kind"] == kind]
        label = {"heldout": "held-out modules", "exact": "exact answers (right axis)"}.get(kind, kind)
        axis.plot([row["minutes"] for row in rows], [row["value"] for row in rows], style, label=label, linewidth=1)
    losses.set(xlabel="minutes", ylabel="loss (nats per token)", ylim=(0, 9))
    shares.set(ylabel="exact answers (%)", ylim=(0, 100))
    losses.legend(loc="upper center")
    shares.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
