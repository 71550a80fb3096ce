"""One HTML page that holds everything it needs: rows, scripts, styles, and a policy that lets it ask nobody."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import quire
from quire.dashboard.gather import File
from quire.dashboard.pack import packed

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
            *("explore", "curves", "best", "techniques", "compare", "roofline", "pareto", "cost", "listing", "main"),
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
