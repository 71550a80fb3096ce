"""One HTML page that holds everything it needs: rows, scripts, styles, and a policy that lets it ask nobody.

Rows are carried with distinct values once, rows as places among them, and all of it compressed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

import quire
from quire.dashboard.gather import File
from quire.figures.metric_definitions import LIMITS, METRICS, Metric
from quire.figures.schema import FigureRow, fields

WEB = Path(__file__).parent / "web"
SHARED = Path(quire.__file__).parent / "server" / "web"
"""The playground's folder, of whose modules this page has `dom.js`."""
UPLOT = (WEB / "uplot" / "uPlot.iife.min.js", WEB / "uplot" / "uPlot.min.css")
MODULES = (
    SHARED / "dom.js",
    *(
        WEB / f"{name}.js"
        for name in (
            *("words", "rows", "statistics", "derive", "state", "details", "points", "chart", "table", "controls"),
            *("explore", "curves", "best", "techniques", "compare", "roofline", "pareto", "cost", "listing"),
            *("summary", "main"),
        )
    ),
)
"""In the order in which they need each other."""
MARK = "<!doctype html>\n<!-- a quire dashboard -->\n"
"""How every page begins."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.MULTILINE)


def page(files: Sequence[File], stamp: str = "") -> bytes:
    """The page of these rows. `stamp`: what `serve` calls their state, which the page then watches; "" for a file."""
    scripts = [UPLOT[0].read_text(), joined(MODULES)]
    styles = [UPLOT[1].read_text(), (WEB / "style.css").read_text()]
    asks = "'self'" if stamp else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'"
    )
    icon = base64.b64encode((SHARED / "icon.svg").read_bytes()).decode()
    return "".join(
        [
            MARK,
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="content-security-policy" content="{escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n<title>quire dashboard</title>\n',
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n',
            *(f"<style>{style}</style>\n" for style in styles),
            "</head>\n",
            (WEB / "body.html").read_text(),
            f'<script type="text/plain" id="data" data-stamp="{escape(stamp)}">{packed(files)}</script>\n',
            f"<script>{scripts[0]}</script>\n",
            f'<script type="module">{scripts[1]}</script>\n',
            "</body>\n</html>\n",
        ]
    ).encode()


def joined(modules: Sequence[Path]) -> str:
    """Modules as one, since a page from a disk may import none: each is a function that returns what it exports."""
    return "\n".join(_enclosed(path) for path in modules)


def _enclosed(path: Path) -> str:
    text = path.read_text()
    exported = ", ".join(match[1] for match in _EXPORT.finditer(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = $\2;", text))
    return f"const ${path.stem} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _hashes(texts: Sequence[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in found)


DISTINCT = ("kind", "benchmark", "suite", "time", "command", "machine", "engine", "model", "load", "technique", "on",
            "improves", "claim", "options", "dialect", "notes")  # fmt: skip
"""Fields of which many rows have the same value. The order is that of a row's places."""
WHOLE = 1 << 53
"""Below it whole numbers are kept to the last digit."""


class Distinct:
    """Values in the order in which they were first seen."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[bytes, int] = {}

    def place(self, value: Any) -> int:
        """Place of a value among them."""
        key = msgspec.json.encode(value)
        place = self._places.setdefault(key, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def packed(files: Sequence[File]) -> str:
    """Base64 of gzip of JSON: text that no HTML parser finds anything in.

    `rows`: [file, line, places of `DISTINCT`, metrics, intervals, samples]; each of the last three begins with the
    place of its names.
    """
    values, names = {name: Distinct() for name in DISTINCT}, Distinct()
    rows = [
        [at, number, [values[name].place(getattr(row, name)) for name in DISTINCT], *_numbers(row, names)]
        for at, file in enumerate(files)
        for number, row in enumerate(file.rows)
    ]
    document = {
        "about": {
            "metrics": {name: _about(metric) for name, metric in METRICS.items()},
            "limits": {name: _about(metric) for name, metric in LIMITS.items()},
            "fields": {name: meaning for name, _, meaning in fields()},
        },
        "files": [file.name for file in files],
        "distinct": DISTINCT,
        "values": {name: each.values for name, each in values.items()},
        "names": names.values,
        "rows": rows,
    }
    return base64.b64encode(gzip.compress(msgspec.json.encode(document), 6, mtime=0)).decode()


def _about(metric: Metric) -> list[str]:
    return [metric.unit, metric.better, metric.definition]


def _numbers(row: FigureRow, names: Distinct) -> list[list[Any]]:
    return [
        [names.place(list(row.metrics)), *map(_short, row.metrics.values())],
        [names.place(list(row.intervals)), *([_short(i.low), _short(i.high)] for i in row.intervals.values())],
        [names.place(list(row.samples)), *([*map(_short, found)] for found in row.samples.values())],
    ]


def _short(value: float) -> float | int:
    """A number with 7 digits, whole ones as they are: more are noise, and a page of 50,000 rows is half as large."""
    if value.is_integer():
        return int(value) if -WHOLE < value < WHOLE else value
    return float(f"{value:.7g}")  # nan and inf stay, for which JSON has null
