"""The page that `quire dashboard` writes, in a real browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, Page

in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
STICKS_OUT = """[...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    const hidden = node.closest(".scroll, #views, .unseen, .tip");
    return box.width && (box.left < -1 || box.right > innerWidth + 1) && !hidden;
}).map((node) => node.outerHTML.slice(0, 99))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@contextlib.contextmanager
def opened(
    browser: Browser, path: Path | str, state: str = "", width: int = 1280, dark: bool = False
) -> Iterator[Page]:
    """A page that shows its rows and whose console stays silent."""
    address = path if isinstance(path, str) else path.as_uri()
    found = browser.page(f"{address}#{state}", width, 844, dark)
    try:
        found.wait("document.querySelector('#loading').hidden")
        yield found
        assert found.errors == []
    finally:
        found.close()
