"""axe-core on a page in Chromium: what a person with a keyboard, a screen reader or weak eyes could not use."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from browser import Page

AXE = Path(__file__).parent / "axe" / "axe.min.js.gz"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = """axe.run(document, {runOnly: RULES}).then((found) =>
    found.violations.flatMap(({id, help, nodes}) => nodes.map(({html, any, all, none}) =>
        [id, help, html.slice(0, 160), ...[...any, ...all, ...none].map(({message}) => message)].join(" | "))))
""".replace("RULES", json.dumps(RULES))


with_axe = pytest.mark.skipif(not AXE.exists(), reason="an sdist has no axe-core; a checkout has")


@cache
def _axe() -> str:
    return gzip.decompress(AXE.read_bytes()).decode()


def violations(page: Page) -> list[str]:
    """What axe-core finds against WCAG 2.2 AA and its own best practices: rule, element and reason of each."""
    if not page.run("'axe' in window"):
        page.run(_axe() + ";0")
    found: list[str] = page.run(RUN)
    return found
