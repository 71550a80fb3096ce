"""Pictures of the playground for the documents, of the embedded model in a real browser: `make pictures`."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from browser import Browser, Page
from live_server import LiveServer
from real_server import real

QUESTIONS = ("What does json.dumps do?", "Describe os.path.join.", "What does shutil.copytree do?", "What is math.gcd?")
SCHEMA = """{
  "type": "object",
  "properties": {
    "module": {"enum": ["math"]},
    "pure": {"type": "boolean"}
  },
  "required": ["module"],
  "additionalProperties": false}"""
TRAFFIC_SECONDS = 90


def ask(page: Page, text: str) -> None:
    """Ask, and wait for the answers."""
    page.run("document.querySelector('#message').focus()")
    page.type(text)
    page.key("Enter")
    page.wait("!document.querySelector('#stop').hidden || document.querySelector('.answer[aria-busy=false]')")
    page.wait("document.querySelector('#stop').hidden")


def traffic(server: LiveServer, stopped: threading.Event) -> None:
    """Answers for the figures to count: more and fewer of them, in turns."""
    end = time.monotonic() + TRAFFIC_SECONDS
    while not stopped.is_set() and time.monotonic() < end:
        count = 1 + int(time.monotonic() / 6) % 4
        fields = {"temperature": 1.0, "max_tokens": 60, "n": 2 * count, "ignore_eos": True}
        server.chat(QUESTIONS[count - 1], **fields)
        stopped.wait(0.15)


def opened(browser: Browser, server: LiveServer, width: int = 1280, height: int = 800) -> Page:
    """A page that is ready."""
    page = browser.page(f"{server.url}/", width, height)
    page.wait("document.querySelector('.model').value")
    return page


def chat_and_figures(browser: Browser, server: LiveServer, folder: Path) -> None:
    """The page in use, in daylight and in the dark."""
    page, stopped = opened(browser, server), threading.Event()
    page.click("#toggle-figures")
    thread = threading.Thread(target=traffic, args=(server, stopped))
    thread.start()
    for question in QUESTIONS[:3]:
        ask(page, question)
    time.sleep(TRAFFIC_SECONDS - 10)
    page.picture(folder / "light.png")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.picture(folder / "dark.png")
    stopped.set()
    thread.join()
    page.close()


def two_answers(browser: Browser, server: LiveServer, folder: Path) -> None:
    """Two settings, the same question."""
    page = opened(browser, server)
    page.click("#toggle-compare")
    second = "form[aria-label='Settings of answer B'] "
    page.fill(f"{second}[name=temperature]", "1.2")
    page.fill(f"{second}[name=seed]", "7")
    page.click("#which-b")
    for question in QUESTIONS[:3]:
        ask(page, question)
    page.picture(folder / "two.png")
    page.close()


def likely_tokens(browser: Browser, server: LiveServer, folder: Path) -> None:
    """What else was likely."""
    page = opened(browser, server)
    page.click("#toggle-probabilities")
    page.fill("[name=temperature]", "0.9")
    page.fill("[name=seed]", "5")
    ask(page, "What does pathlib.Path.walk do in a folder of many files?")
    page.hover(".token:is(.p2, .p3, .p4)")
    page.wait("!document.querySelector('#tooltip').hidden")
    page.picture(folder / "tokens.png")
    page.close()


def shaped(browser: Browser, server: LiveServer, folder: Path) -> None:
    """An answer of a schema."""
    page = opened(browser, server)
    page.fill("[name=shape]", "json_schema")
    page.fill("[name=text]", SCHEMA)
    page.fill("[name=max_tokens]", "60")
    page.click("[name=compact]")
    ask(page, "Describe math.gcd.")
    page.run("document.querySelector('#settings').scrollTop = 1e6")
    page.picture(folder / "structured.png")
    page.close()


def first_look(browser: Browser, server: LiveServer, folder: Path) -> None:
    """What is seen before the first question, and the chat as code."""
    page = opened(browser, server)
    page.wait("document.querySelector('.abilities')")
    page.picture(folder / "start.png")
    page.click("#toggle-settings")
    ask(page, QUESTIONS[0])
    page.click("#show-code")
    page.picture(folder / "code.png")
    page.close()


def phone(browser: Browser, server: LiveServer, folder: Path) -> None:
    """A narrow window."""
    page = opened(browser, server, 390, 780)
    for question in QUESTIONS[:3]:
        ask(page, question)
    page.picture(folder / "phone.png")
    page.close()


def main(folder: Path) -> None:
    """All of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with real() as server, Browser() as browser:
        for picture in (first_look, two_answers, likely_tokens, shaped, phone, chat_and_figures):
            picture(browser, server, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
