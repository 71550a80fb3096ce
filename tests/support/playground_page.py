"""The playground in a headless Chromium."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from browser import CHROMIUM, Browser, Page
from live_server import LiveServer
from real_server import real

in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
DONE = "document.querySelector('.lane:not([hidden]) .answer:last-child[aria-busy=false]')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real() as found:
        yield found


@contextlib.contextmanager
def opened(browser: Browser, url: str, width: int = 1280, height: int = 800) -> Iterator[Page]:
    """A page whose console stays silent."""
    page = browser.page(url, width, height)
    try:
        yield page
        assert page.errors == []
    finally:
        page.close()


@contextlib.contextmanager
def chatting(browser: Browser, server: LiveServer, width: int = 1280, height: int = 800) -> Iterator[Page]:
    """A page that knows its models."""
    with opened(browser, f"{server.url}/", width, height) as page:
        page.wait("document.querySelector('.model').value")
        yield page


def ask(page: Page, text: str) -> None:
    """Ask by keyboard, and wait for every answer that is shown."""
    count = page.run("document.querySelectorAll('.answer').length")
    page.run("document.querySelector('#message').focus()")
    page.type(text)
    page.key("Enter")
    page.wait(
        f"document.querySelectorAll('.answer').length > {count} && {DONE} && document.querySelector('#stop').hidden"
    )
