"""Charts of quality against size and speed of several models made of one source, with the Pareto front marked.

A model is on the front if no other is at least as good in both and better in one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quire.compress.evaluation.passport import Passport
from quire.core.errors import ConfigError
from quire.core.files import write_whole

WIDTH, HEIGHT = 680, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 40, 60
"""Margins of a drawing in pixels."""
LINE = 14
"""Pixels between labels that would lie over each other."""
LETTER = 7
"""Pixels of a letter of a label, about."""
STYLE = """
:root { color-scheme: light dark;
  --ink: #1a1a1a; --paper: #ffffff; --faint: #d8d8d8; --off: #7a7a7a; --front: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --faint: #3a3d44; --off: #9a9a9a; --front: #6cb2ff; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } .grid { stroke: var(--faint); } .off { fill: var(--off); } .on { fill: var(--front); }
.front { stroke: var(--front); stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr.on td:first-child { color: var(--front); font-weight: 600; }
.wide { overflow-x: auto; }
""".strip()


@dataclass(frozen=True)
class Point:
    """A model: `y` is its KL to the source; `front`: whether no other is better in both."""

    name: str
    x: float
    y: float
    front: bool


@dataclass(frozen=True)
class Panel:
    """One drawing."""

    title: str
    x_label: str
    points: tuple[Point, ...]


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tell which points (both numbers the lower the better) are such that none is as low in both and lower in one."""
    found, lowest, last = [False] * len(points), math.inf, (math.nan, math.nan)
    for i in sorted(range(len(points)), key=points.__getitem__):
        # Equal points follow each other and are on the front together.
        if points[i][1] < lowest or points[i] == last:
            found[i], last = True, points[i]
        lowest = min(lowest, points[i][1])
    return found


def panels_of(passports: Mapping[str, Passport]) -> list[Panel]:
    """Make drawings of KL against size, and against speed where all were timed. The source is a point as well.

    `ConfigError` for none, and for passports of several sources or of several texts, whose numbers cannot be compared.
    """
    if not passports:
        raise ConfigError("there is no passport to draw")
    (first, beside), *rest = passports.items()
    for name, passport in rest:
        same = {
            "source": passport.digests["source"] == beside.digests["source"],
            "text": passport.evaluation.digest == beside.evaluation.digest,
        }
        for what in (what for what, it_is in same.items() if not it_is):
            raise ConfigError(f"{name} was measured with another {what} than {first}; measure both with one")
    source = beside.of_source
    sizes = {"source": (source.size_bytes / 1e6, 0.0)}
    sizes |= {name: (p.size_bytes / 1e6, p.kl) for name, p in passports.items()}
    panels = [_panel("Quality and size", "weights on disk, MB", sizes, 1)]
    if all(p.speed for p in passports.values()):
        speeds = {"source": (1.0, 0.0)}
        speeds |= {name: (p.speed[0].ratio.batch_1, p.kl) for name, p in passports.items()}
        panels.append(_panel("Quality and speed", "tokens/s of one stream, times the source's", speeds, -1))
    return panels


def _panel(title: str, x_label: str, points: Mapping[str, tuple[float, float]], sign: int) -> Panel:
    """Make one drawing. `sign`: 1 where less is better, -1 where more is."""
    on = pareto([(sign * x, y) for x, y in points.values()])
    drawn = (Point(name, x, y, front) for (name, (x, y)), front in zip(points.items(), on, strict=True))
    return Panel(title, x_label, tuple(drawn))


def write_frontier(path: Path, passports: Mapping[str, Passport]) -> None:
    """Draw `passports` (name -> what was measured) to `path`: .html, a page that needs nothing else, or .png.

    `ConfigError` for another suffix, for what cannot be written, and for a PNG without matplotlib.
    """
    panels = panels_of(passports)
    if path.suffix == ".html":
        data = page(panels, passports).encode()
    elif path.suffix == ".png":
        data = _picture(panels)
    else:
        raise ConfigError(f"{path}: a frontier is drawn as .html or .png", param="frontier")
    try:
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="frontier") from None


def page(panels: Sequence[Panel], passports: Mapping[str, Passport]) -> str:
    """Return the drawings and their numbers as one page, without a script and without anything from elsewhere."""
    drawings = "\n".join(f"<h2>{escape(p.title)}</h2>\n{_svg(p)}" for p in panels)
    any_passport = next(iter(passports.values()))
    of, source = any_passport.evaluation, any_passport.of_source
    title = f"{escape(any_passport.source)}: what smaller costs"
    front = {point.name for panel in panels for point in panel.points if point.front}
    rows = [_row("source", front, 0.0, 1.0, source.bits_per_byte, source.size_bytes, 1.0)]
    for name, p in passports.items():
        speed = p.speed[0].ratio.batch_1 if p.speed else None
        rows.append(_row(name, front, p.kl, p.top1, p.bits_per_byte, p.size_bytes, speed))
    heads = ("model", "KL", "same top token", "bits per byte", "MB", "speed")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>KL to the source in nats a token, {of.tokens:,} tokens of {of.texts} texts. Blue: no other model is "
        f'better in both.</p>\n{drawings}\n<div class="wide">\n<table>\n<tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr>\n{chr(10).join(rows)}\n</table>\n</div>\n</body>\n</html>\n"
    )


def _row(name: str, front: set[str], kl: float, top1: float, bits: float, size: int, speed: float | None) -> str:
    cells = [escape(name), f"{kl:.5f}", f"{100 * top1:.2f} %", f"{bits:.4f}", f"{size / 1e6:,.1f}"]
    cells.append("-" if speed is None else f"{speed:.2f}")
    mark = ' class="on"' if name in front else ""
    return f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def ticks(top: float) -> list[float]:
    """Return round numbers from 0 to at least `top`, four to eight of them beside 0."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(power * times for times in (1, 2, 5, 10) if top / (power * times) <= 8)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def _svg(panel: Panel) -> str:
    across, up = (ticks(max(getattr(p, axis) for p in panel.points)) for axis in "xy")

    def at(x: float, y: float) -> tuple[float, float]:
        left = LEFT + (WIDTH - LEFT - RIGHT) * x / across[-1]
        return left, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / up[-1]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">']
    for x in across:
        left, low = at(x, 0)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{low:.1f}"/>')
        parts.append(f'<text x="{left:.1f}" y="{low + 18:.1f}" text-anchor="middle">{x:.6g}</text>')
    for y in up:
        left, level = at(0, y)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{level + 4:.1f}" text-anchor="end">{y:.6g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 14}">KL to the source, nats a token</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.x, p.y) for p in _front(panel)))
    parts.append(f'<polyline class="front" points="{line}"/>')
    places = [at(p.x, p.y) for p in panel.points]
    for p, (x, y), (label_x, label_y, anchor) in zip(panel.points, places, _labels(panel, places), strict=True):
        kind, told = ("on" if p.front else "off"), f"{p.name}: KL {p.y:.5f} at {p.x:.4g}"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(told)}</title></circle>')
        parts.append(f'<text x="{label_x:.1f}" y="{label_y:.1f}" text-anchor="{anchor}">{escape(p.name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _front(panel: Panel) -> list[Point]:
    return sorted((p for p in panel.points if p.front), key=lambda p: (p.x, p.y))


def _labels(panel: Panel, places: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Place names beside their points, on the side where there is room, none over another."""
    boxes: list[tuple[float, float, float]] = []
    found = []
    for p, (x, y) in zip(panel.points, places, strict=True):
        wide = LETTER * len(p.name)
        right = x + 9 + wide < WIDTH
        start, level = (x + 9 if right else x - 9 - wide), y - 6
        while any(abs(level - other) < LINE and start < end and begin < start + wide for begin, end, other in boxes):
            level -= LINE
        boxes.append((start, start + wide, level))
        found.append((x + 9 if right else x - 9, level, "start" if right else "end"))
    return found


def _picture(panels: Sequence[Panel]) -> bytes:
    """Draw the panels beside each other, as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a PNG is drawn by matplotlib: pip install matplotlib, or name a .html file") from None
    figure = Figure(figsize=(7.0 * len(panels), 4.5), layout="constrained")
    for i, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), i)
        front = _front(panel)
        axes.plot([p.x for p in front], [p.y for p in front], "--", color="#0b62c4", linewidth=1)
        for p in panel.points:
            axes.plot(p.x, p.y, "o", color="#0b62c4" if p.front else "#7a7a7a")
            axes.annotate(p.name, (p.x, p.y), xytext=(6, 5), textcoords="offset points", fontsize=8, parse_math=False)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel="KL to the source, nats a token")
        # Names stand to the right of their points.
        axes.set_xlim(0, 1.25 * max(p.x for p in panel.points))
        axes.set_ylim(0, 1.1 * max(p.y for p in panel.points) or 1)
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=120)
    return found.getvalue()
