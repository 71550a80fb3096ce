"""The page at `/` for everybody: by keys alone, read aloud, in the dark, on a phone."""

from __future__ import annotations

import json

import pytest

from accessibility import violations, with_axe
from browser import Browser, Page
from live_server import LiveServer, live
from playground_page import DONE, ask, chatting, in_chromium
from playground_page import browser as browser
from playground_page import server as server

ANSWER = """# Title

text `code` $x^2$ and [a link](https://a.b/c)

|a|b|
|-|-:|
|1|2|

```python
x = 'a'  # b
```

- a
- b"""
DEMO = """(async () => {
    const { Conversation } = await import("./playground/chat/conversation.js");
    const { Store } = await import("./playground/storage/store.js");
    const talk = new Conversation();
    const question = talk.add(null, {role: "user", text: "Show it."});
    talk.add(question, {role: "assistant", text: "Another.", measured: "1 token"});
    const entries = ["a", " b", "<|end|>"].map((token, i) => (
        {token, logprob: -i, bytes: null, top_logprobs: [{token, logprob: -i}]}));
    talk.add(question, {role: "assistant", text: ANSWER, reasoning: "Hm.", measured: "9 tokens", entries});
    const call = {id: "c", name: "f", arguments: "{}"};
    talk.add(talk.path.at(-1), {role: "assistant", text: "", calls: [call], error: "It failed."});
    const lane = {model: "stub", settings: {}, tree: talk.state};
    const facts = {id: "x", title: "Demo", named: true, updated: Date.now(), compare: true};
    await new Store().put("chats", {...facts, lanes: [lane, lane]});
    location.hash = "chat=x";
})()""".replace("ANSWER", json.dumps(ANSWER))
SMALL = """[...document.querySelectorAll("button, input, select, textarea, summary, a[href]")].filter((node) => {
    const box = node.getBoundingClientRect();
    const inline = node.tagName === "A" && node.closest("p");
    return box.width > 1 && !inline && (box.width < 24 || box.height < 24);
}).map((node) => node.outerHTML.slice(0, 120))"""
WIDE = """[...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width > 1 && (box.left < -1 || box.right > innerWidth + 1) && !node.closest(".code pre, .table, math");
}).map((node) => node.outerHTML.slice(0, 99))"""

SLOW_DARK, SLOW_PHONE = (pytest.param(*each, marks=pytest.mark.slow) for each in (("dark", 1280), ("light", 320)))


def scheme(page: Page, name: str) -> None:
    """Have the system prefer light or dark."""
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


@in_chromium
@with_axe
@pytest.mark.parametrize(("name", "width"), [("light", 1280), SLOW_DARK, SLOW_PHONE])
def test_axe_finds_nothing(browser: Browser, name: str, width: int) -> None:
    with live() as server, chatting(browser, server, width, 800) as page:
        scheme(page, name)
        page.wait("document.querySelector('.abilities')")
        assert violations(page) == [] and page.run(SMALL) == []
        page.run(DEMO)
        page.wait("document.querySelectorAll('.answer').length === 4")
        assert violations(page) == [] and page.run(SMALL) == []
        for button in ("#toggle-probabilities", "#toggle-figures", "#toggle-history"):
            page.click(button)
            assert violations(page) == [] and page.run(SMALL) == [], button
        if width > 400:
            page.click(".mine .edit")
            page.click("#toggle-settings")
            page.click("#preset-save")
            assert violations(page) == [] and page.run(SMALL) == []
            for button, dialog in (("#show-code", "#code"), ("#show-shortcuts", "#shortcuts")):
                page.click(button)
                assert page.run(f"document.querySelector('{dialog}').open")
                assert violations(page) == [], dialog
                page.key("Escape")


@in_chromium
@with_axe
def test_axe_finds_nothing_where_a_key_is_wanted(browser: Browser) -> None:
    with live(api_key=("k",)) as server:
        page = browser.page(f"{server.url}/")
        page.wait("!document.querySelector('#unlock').hidden")
        assert violations(page) == []
        page.close()
    with live() as server, chatting(browser, server) as page:
        assert page.run("document.querySelector('#unlock').hidden"), "nobody is asked for a key that nobody needs"


def tab_to(page: Page, selector: str, back: bool = False) -> None:
    """Go there by the tab key."""
    for _ in range(80):
        page.key("Tab", shift=back)
        if page.run(f"document.activeElement?.matches({json.dumps(selector)})"):
            outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or selector == "#message", "the focus is seen"
            return
    raise AssertionError(f"no way to {selector}")


@in_chromium
def test_everything_by_keys_alone(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        assert page.run("document.activeElement.id") == "message"
        page.type("What does json.dumps do?")
        page.key("Enter")
        page.wait(DONE)
        page.wait("document.querySelector('#status').textContent.startsWith('Answer ended: 17 tokens')")
        page.key("ArrowUp")
        assert page.run("document.activeElement.className") == "anew"
        page.key("Escape")
        assert page.run("document.activeElement.classList.contains('edit')")
        tab_to(page, ".again")
        page.key("Enter")
        page.wait(f"{DONE} && document.querySelector('.answer .place').textContent === '2 / 2'")
        page.key("o", shift=True, ctrl=True)
        assert page.run("document.activeElement.id") == "message" and page.run("location.hash") == ""
        page.key("k", ctrl=True)
        assert page.run("document.activeElement.id") == "search"
        tab_to(page, ".chat .title")
        page.key("Enter")
        page.wait("document.querySelector('.answer')")
        tab_to(page, ".chat .more", back=True)
        page.key("Enter")
        assert page.run("document.activeElement.textContent") == "Rename"
        page.key("Escape")
        page.wait("!document.querySelector('#chat-menu').matches(':popover-open')")
        page.key("?")
        assert page.run("document.querySelector('#shortcuts').open")
        page.key("Escape")
        for panel in ("settings", "history"):
            shown = page.run(f"document.querySelector('#{panel}').hidden")
            page.key(*("," if panel == "settings" else "s"), shift=panel == "history", ctrl=True)
            assert page.run(f"document.querySelector('#{panel}').hidden") != shown
        page.run("document.activeElement.blur()")
        page.key("/")
        assert page.run("document.activeElement.id") == "message"


@in_chromium
def test_light_dark_and_as_the_system_has_it(browser: Browser, server: LiveServer) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with chatting(browser, server) as page:
        light = page.run(background)
        scheme(page, "dark")
        dark = page.run(background)
        assert light != dark
        page.click("#theme")
        assert page.run(background) == light and page.run("document.querySelector('#theme').title") == "Theme: light"
        page.click("#theme")
        scheme(page, "light")
        assert page.run(background) == dark
        page.run("window.old = true")
        page.call("Page.reload")
        page.wait("!window.old && document.querySelector('.model')?.value")
        assert page.run(background) == dark, "it is kept"
        page.click("#theme")
        assert page.run(background) == light and page.run("localStorage.length") == 0


@in_chromium
def test_a_narrow_phone_sees_everything(browser: Browser) -> None:
    with live() as server, chatting(browser, server, 320, 640) as page:
        page.wait("document.querySelector('.abilities')")
        assert page.run(WIDE) == []
        page.run(DEMO)
        page.wait("document.querySelectorAll('.answer').length === 4")
        page.click("#toggle-probabilities")
        assert page.run(WIDE) == []
        for panel in ("history", "settings", "figures"):
            page.click(f"#toggle-{panel}")
            assert page.run(f"!document.querySelector('#{panel}').hidden") and page.run(WIDE) == []
        page.click("#figures .close")
        page.click("#show-code")
        assert page.run(WIDE) == []
        page.key("Escape")
        page.click("#toggle-history")
        page.click(".chat .title")
        page.wait("document.querySelector('#history').hidden")
        ask(page, "hello")
