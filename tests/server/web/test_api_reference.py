"""The page at `/docs`: /openapi.json as people read it, and requests that are tried from it, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from accessibility import violations, with_axe
from browser import CHROMIUM, Browser
from live_server import live
from proxy import shown_below
from quire.server.openapi import document
from quire.server.pages import HEADERS, REFERENCE
from quire.server.routes import TABLE
from stub_engine import StubEngine

in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
STICKS_OUT = """[...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && (box.left < -1 || box.right > innerWidth + 1) && !node.closest(".scroll, pre, .unseen");
}).map((node) => node.outerHTML.slice(0, 99))"""
CHAT = "document.getElementById('post/v1/chat/completions')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def test_the_files_are_served_strictly_and_parse_no_markup() -> None:
    with live(playground=False) as server:
        page = server.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        names = re.findall(r'(?:src|href)="(docs/[^"]+)"', page.text)
        names += [f"docs/{path.name}" for path in REFERENCE.glob("*.js")] + ["docs/api.js", "docs/dom.js"]
        for name in names:
            reply = server.http.get(f"/{name}")
            assert reply.status_code == 200 and {key: reply.headers[key] for key in HEADERS} == HEADERS, name
    for path in REFERENCE.iterdir():
        text = path.read_text()
        assert text.count("\n") <= 400 and max(map(len, text.splitlines())) <= 240, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), (
            path.name
        )
        assert not re.search(r"https?://|style=|\son\w+=", text), path.name


def test_every_operation_is_in_a_group() -> None:
    paths = document("1", TABLE.routes, False)["paths"]
    groups = {facts["tags"][0] for verbs in paths.values() for facts in verbs.values()}
    assert groups == {"OpenAI", "Anthropic", "Ollama", "llama.cpp", "TGI", "TEI", "Monitoring", "Administration"}
    assert paths["/v1/models/load"]["post"]["tags"] == ["Administration"]
    assert paths["/dashboard/state"]["get"]["tags"] == ["Monitoring"]


@in_chromium
def test_it_shows_every_operation_and_its_fields(browser: Browser) -> None:
    with live(StubEngine()) as server:
        page = browser.page(f"{server.url}/docs")
        page.wait("document.querySelector('.operation')")
        count = sum(len(verbs) for verbs in server.http.get("/openapi.json").json()["paths"].values())
        assert page.run("document.querySelectorAll('.operation').length") == count
        page.run("document.querySelector('#find').focus()")
        page.type("beam chat")
        page.wait(f"document.querySelectorAll('.operation:not([hidden])').length === 1 && !{CHAT}.hidden")
        page.run(f"{CHAT}.querySelector('summary').focus()")
        page.key("Enter")
        page.wait(f"{CHAT}.querySelector('.fields')")
        text = page.run(f"{CHAT}.innerText")
        assert "temperature" in text and "number, 0 to 100" in text and "required" in text, text[:2000]
        assert "fields that are refused or ignored" in text and page.run("location.hash").startswith("#post")
        page.run(f"{CHAT}.querySelector('.nested').open = true")
        page.wait(f"{CHAT}.querySelector('.nested .fields')")
        assert page.errors == [] and all(url.startswith(server.url) for url in page.loaded)
        page.close()


@in_chromium
@with_axe
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_axe_finds_nothing(browser: Browser, dark: bool, width: int) -> None:
    with live(StubEngine()) as server:
        page = browser.page(f"{server.url}/docs#post/v1/chat/completions", width, 844, dark)
        page.wait(f"{CHAT}?.open && {CHAT}.querySelector('textarea')")
        assert violations(page) == []


@in_chromium
def test_it_tries_requests_by_keyboard_whole_and_as_a_stream(browser: Browser) -> None:
    with live(StubEngine()) as server, shown_below("/q", server.url) as url:
        page = browser.page(f"{url}/docs#post/v1/chat/completions", 390, 844, dark=True)
        page.wait(f"{CHAT}?.open && {CHAT}.querySelector('textarea')")
        body = json.loads(page.run(f"{CHAT}.querySelector('textarea').value"))
        assert body["model"] == "stub" and body["messages"][0]["role"] == "user" and body["max_tokens"] == 32
        command = page.run(f"{CHAT}.querySelector('.command').textContent")
        assert f"{url}/v1/chat/completions" in command and "-d '{" in command
        page.run(f"{CHAT}.querySelector('button[type=submit]').focus()")
        page.key("Enter")
        page.wait(f"/^200 /.test({CHAT}.querySelector('.status').textContent)")
        assert json.loads(page.run(f"{CHAT}.querySelector('.reply').textContent"))["object"] == "chat.completion"
        page.run(f"{CHAT}.querySelector('.check input').click()")
        page.run(f"{CHAT}.querySelector('form').requestSubmit()")
        page.wait(f"{CHAT}.querySelector('.reply').textContent.includes('data: [DONE]')")
        page.fill("details[open] textarea", "no JSON")
        page.run(f"{CHAT}.querySelector('form').requestSubmit()")
        page.wait(f"/^400 /.test({CHAT}.querySelector('.status').textContent)")
        assert page.run(STICKS_OUT) == []
        page.close()


@in_chromium
def test_every_example_is_one_that_the_server_reads(browser: Browser) -> None:
    with live(StubEngine()) as server:
        page = browser.page(f"{server.url}/docs")
        page.wait("document.querySelector('.operation')")
        page.run("document.querySelectorAll('.operation').forEach((node) => { node.open = true; })")
        page.wait("[...document.querySelectorAll('.operation')].every((node) => node.querySelector('form'))")
        bodies = "[...document.querySelectorAll('.operation')].filter((node) => node.querySelector('textarea'))"
        found = page.run(f"{bodies}.map((node) => [node.id.slice(4), node.querySelector('textarea').value])")
        assert len(found) > 20
        for path, body in found:
            reply = server.post(path, json.loads(body))
            told = reply.text
            assert reply.status_code != 400 or "lora" in path or "embed" in told or "score" in told, (path, body, told)
        assert page.run(STICKS_OUT) == [] and page.errors == []
        page.close()


@in_chromium
def test_it_asks_for_a_key(browser: Browser) -> None:
    with live(api_key=("secret",)) as server:
        page = browser.page(f"{server.url}/docs")
        page.wait("document.querySelector('#notice').innerText.includes('wants a key')")
        assert page.run("document.querySelector('#key-box').open")
        page.fill("#key", "secret")
        page.wait("document.querySelector('#notice').hidden && document.querySelector('.operation')")
        page.close()
