"""Charts of horizontal bars, as SVG that reads well in light and dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LABEL, BAR, GAP, TOP = 760, 300, 20, 10, 62
"""Pixels: of a chart, its labels, a bar, the gap behind it, and the title."""
STYLE = """
text { fill: #222; font: 14px sans-serif } .t { font-weight: bold; font-size: 15px } .s { fill: #555; font-size: 12px }
.b { fill: #7986cb } .h { fill: #3f51b5 }
@media (prefers-color-scheme: dark) {
.g { fill: #1e2129 } text { fill: #eee } .s { fill: #bbb } .b { fill: #5c6bc0 } .h { fill: #9fa8da } }
"""


class Bar(NamedTuple):
    """One bar: its label, its length in the chart's unit, the text behind it, and whether it stands out."""

    label: str
    value: float
    text: str
    strong: bool = False


def chart(title: str, source: str, bars: Sequence[Bar]) -> str:
    """Return an SVG document with horizontal bars; `source` names the file of results and the conditions."""
    scale = (WIDTH - LABEL - 130) / max(bar.value for bar in bars)
    height = TOP + len(bars) * (BAR + GAP) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="g" width="{WIDTH}" height="{height}" fill="#fafafa" rx="6"/>',
        f'<text class="t" x="14" y="25">{escape(title)}</text><text class="s" x="14" y="45">{escape(source)}</text>',
    ]
    for at, bar in enumerate(bars):
        y = TOP + at * (BAR + GAP)
        width = max(1.0, bar.value * scale)
        kind = "h" if bar.strong else "b"
        lines += [
            f'<text x="{LABEL - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
            f'<text x="{LABEL + width + 8:.1f}" y="{y + 15}">{escape(bar.text)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
