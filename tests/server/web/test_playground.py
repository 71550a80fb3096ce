"""The page at `/`: what is served, and what people see and do in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import Browser, Page
from live_server import LiveServer, live
from playground_page import DONE, ask, chatting, in_chromium, opened
from playground_page import browser as browser
from playground_page import server as server
from proxy import shown_below
from quire.server.pages import FOLDER, HEADERS
from several_models import Stubs, list_of, serving
from stub_engine import StubEngine
from tiny_model import write_tiny

FILES = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}


def test_the_files_are_whole_small_and_strict() -> None:
    with live() as server:
        page = server.http.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        names = {f"playground/{name}" for name in FILES if name != "index.html"}
        sizes = [len(page.content)]
        for name in names:
            reply = server.http.get(f"/{name}")
            assert reply.status_code == 200 and reply.text
            assert {key: reply.headers[key] for key in HEADERS} == HEADERS
            sizes.append(len(reply.content))
        assert sum(sizes) <= 200_000
        linked = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
        imported = {f"playground/{(path.parent / name).resolve().relative_to(FOLDER)}" for path in FILES.values()
                    for name in re.findall(r'from "(\.\.?/[^"]+)"', path.read_text())}  # fmt: skip
        assert linked | imported == names, "every file is used, and nothing else"
        assert server.http.get("/playground/nothing.js").status_code == 404
        assert server.http.head("/").status_code == 200 and server.http.put("/").status_code == 405
        assert "get" not in server.http.get("/openapi.json").json()["paths"]["/"]


def test_files_are_as_short_as_others_and_parse_no_markup() -> None:
    for path in FILES.values():
        text = path.read_text()
        assert text.count("\n") <= 400 and max(map(len, text.splitlines())) <= 240, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), (
            path.name
        )
        assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1998/Math/MathML)\b)[\w.]+/", text), (
            f"{path.name}: an address elsewhere"
        )
        assert not re.search(r"style=|\son\w+=", text) or path.suffix != ".html"


def test_it_can_be_left_out() -> None:
    with live(playground=False, api_key=("k",)) as server:
        assert server.http.get("/").status_code == 401
        for path, status in (("/", 405), ("/playground/main.js", 404)):  # texts may be sent to the first
            assert server.http.get(path, headers={"authorization": "Bearer k"}).status_code == status


@pytest.mark.parametrize("root_path", ["", "/some/where"])
def test_the_page_is_public_and_what_it_asks_is_not(root_path: str) -> None:
    with live(api_key=("k",), protect_metrics=True, root_path=root_path) as server:
        for path in ("/", "/playground/main.js", "/livez"):
            assert server.http.get(path).status_code == 200, path
        assert server.http.post("/", json={"inputs": "a"}).status_code == 401
        for path in ("/v1/models", "/metrics", "/playground", "/playground/main.jsx"):
            assert server.http.get(path).status_code == 401, path


@in_chromium
def test_it_chats_and_loads_little(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.click("#toggle-figures")
        ask(page, "What does json.dumps do?")
        assert "Serialize obj to a JSON formatted str." in page.text(".answer")
        assert page.run("document.querySelector('.answer .markdown code').textContent") == "obj"
        assert re.search(r"17 tokens · first after \d+ ms · [\d.]+ tokens/s · stop", page.text(".stats"))
        page.click(".again")
        page.wait(DONE)
        assert page.run("document.querySelectorAll('.answer').length") == 1
        ask(page, "What is math.gcd?")
        assert page.run("document.querySelectorAll('.question').length") == 2
        seen = "[...document.querySelectorAll('.again')].map((node) => node.getClientRects().length > 0)"
        assert page.run(seen) == [True, True], "every answer can be asked for again"
        page.wait("document.querySelector('.tile:nth-child(4) b').textContent !== '\\u2013'")
        page.wait("/median [\\d.]+ m?s/.test(document.querySelector('figure:nth-of-type(4) .legend').innerText)")
        page.click("#new-chat")
        assert page.run("document.querySelector('.log').children.length") == 0
        came = page.loaded
        assert {"/", "/playground/main.js", "/v1/models", "/metrics"} <= {httpx.URL(url).path for url in came}
        assert all(url.startswith(server.url) for url in came)
        assert sum(size for url, size in came.items() if not url.endswith(("/metrics", "/completions"))) <= 200_000


@in_chromium
def test_the_conversation_is_sent_with_the_settings(browser: Browser) -> None:
    with live() as server, chatting(browser, server) as page:
        page.fill("[name=system]", "Be brief.")
        for name, value in {"temperature": "0.55", "top_k": "7", "max_tokens": "6", "seed": "3"}.items():
            page.fill(f"[name={name}]", value)
        page.fill("[name=stop]", "one\ntwo")
        ask(page, "first")
        ask(page, "second")
        bodies = sent(page)
        assert len(bodies) == 2 and bodies[1]["model"] == "stub"
        chosen = {"temperature": 0.55, "top_k": 7, "max_tokens": 6, "seed": 3, "stop": ["one", "two"]}
        assert all(body.items() >= chosen.items() and "top_p" not in body for body in bodies)
        assert [m["role"] for m in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
        assert bodies[1]["messages"][1]["content"] == "first" and bodies[1]["messages"][2]["content"]
        assert "logprobs" not in bodies[1]


def sent(page: Page) -> list[dict[str, Any]]:
    """The bodies of requests for answers."""
    events = [e["params"]["request"] for e in page.browser.events
              if e.get("sessionId") == page.session and e["method"] == "Network.requestWillBeSent"]  # fmt: skip
    return [json.loads(r["postData"]) for r in events if r["url"].endswith("/chat/completions")]


@in_chromium
def test_the_keyboard_sends_breaks_lines_and_stops(browser: Browser) -> None:
    with live(StubEngine(step_seconds=0.05)) as server, chatting(browser, server) as page:
        page.type("one")
        page.key("Enter", shift=True)
        page.type("two")
        assert page.run("document.querySelector('#message').value") == "one\ntwo"
        page.fill("[name=max_tokens]", "200")
        page.run("document.querySelector('#message').focus()")
        page.key("Enter")
        page.wait("document.querySelector('.markdown').textContent.length > 3")
        assert page.text(".question") == "one\ntwo" and not page.run("document.querySelector('#stop').hidden")
        page.key("Escape")
        page.wait(DONE)
        assert page.text(".stats").endswith("cancelled") and page.run("document.querySelector('#stop').hidden")
        page.wait("true")
        page.click(".again")
        page.wait("document.querySelector('.markdown').textContent.length > 3")
        page.click("#stop")
        page.wait(DONE)
        assert len(sent(page)) == 2


@in_chromium
def test_tokens_show_what_else_was_likely(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.click("#toggle-probabilities")
        ask(page, "What does os.path.join do?")
        tokens = page.run("document.querySelector('.scored').textContent")
        assert tokens.startswith("Join two or more pathname components")
        assert "<|" not in tokens, "a token that the text leaves out is no text here either"
        assert "<|end|>" in page.run("document.querySelector('.hidden-token').getAttribute('aria-label')")
        page.hover(".token")
        page.wait("!document.querySelector('#tooltip').hidden")
        assert re.search(r"^J +\d+ %", page.text("#tooltip"))
        assert page.run("document.querySelectorAll('#tooltip tr').length") >= 5
        page.run("document.querySelector('.token').focus()")
        page.key("ArrowRight")
        assert page.run("document.activeElement === document.querySelectorAll('.token')[1]")
        assert page.run("document.activeElement.getAttribute('aria-describedby')") == "tooltip"
        page.click("#toggle-probabilities")
        assert page.run("document.querySelector('.scored').hidden")
        assert page.text(".markdown").startswith("Join two or more pathname components")


@in_chromium
def test_two_answers_side_by_side(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.click("#toggle-compare")
        page.click("#which-b")
        page.fill("form[aria-label='Settings of answer B'] [name=max_tokens]", "3")
        ask(page, "What does json.dumps do?")
        page.wait("document.querySelectorAll('.answer[aria-busy=false]').length === 2")
        first, second = page.run("[...document.querySelectorAll('.answer')].map((node) => node.innerText)")
        assert "17 tokens" in first and "3 tokens" in second and "· length" in second
        boxes = page.run("[...document.querySelectorAll('.lane')].map((n) => n.getBoundingClientRect().left)")
        assert boxes[1] > boxes[0] + 300
        page.click("#toggle-compare")
        assert page.run("document.querySelectorAll('.lane')[1].hidden")


@in_chromium
def test_the_picker_offers_each_of_several_models(browser: Browser, tmp_path: Path) -> None:
    stubs = Stubs()
    with serving(list_of(write_tiny(tmp_path), "ab"), stubs) as several, opened(browser, f"{several.url}/") as page:
        page.wait("document.querySelector('.model').value")
        assert page.run("[...document.querySelector('.model').options].map((one) => one.value)") == ["a", "b"]
        page.run("document.querySelector('.model').value = 'b'")
        ask(page, "x")
        assert stubs.loaded == ["b"] and stubs.asked() == "b"


@in_chromium
def test_structured_output_by_form(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.fill("[name=shape]", "choice")
        page.fill("[name=text]", "red\ngreen\n")
        ask(page, "A colour?")
        assert page.text(".markdown") in ("red", "green")
        page.fill("[name=shape]", "json_schema")
        page.fill("[name=text]", '{"enum": [1, 22]}')
        ask(page, "A number?")
        assert page.text(".answer:last-child pre") in ("1", "22")
        page.fill("[name=text]", '{"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2}')
        page.click("[name=compact]")
        ask(page, "Numbers?")
        assert page.text(".answer:last-child pre").startswith("[1,2")
        page.fill("[name=text]", '{"enum": ')
        page.run("document.querySelector('#message').focus()")
        page.type("And now?")
        page.key("Enter")
        assert "the schema is not JSON" in page.text("#notice")
        assert page.run(
            "document.activeElement.name === 'text' && document.querySelector('#message').value === 'And now?'"
        )


@in_chromium
def test_what_the_server_refuses_is_shown(browser: Browser, server: LiveServer) -> None:
    page = browser.page(f"{server.url}/")
    page.wait("document.querySelector('.model').value")
    page.fill("[name=shape]", "regex")
    page.fill("[name=text]", "(")
    ask(page, "A text?")
    assert "structured_outputs" in page.text(".answer .error")
    assert len(page.errors) == 1 and "400" in page.errors[0], "the browser notes a 400 by itself, and nothing else"
    page.fill("[name=text]", "[ab]{3}")
    page.click(".again")
    page.wait(f"{DONE} && document.querySelector('.answer .error').hidden")
    assert re.fullmatch("[ab]{3}", page.text(".markdown"))
    page.close()


@in_chromium
def test_a_key_is_asked_for_and_kept_by_the_tab(browser: Browser) -> None:
    with live(api_key=("secret",), protect_metrics=True) as server:
        page = browser.page(f"{server.url}/")
        page.wait("!document.querySelector('#notice').hidden")
        assert "wants a key" in page.text("#notice") and page.run("document.activeElement.id") == "key"
        page.click("#toggle-figures")
        page.fill("#key", "secret")
        page.wait("document.querySelector('.model').value === 'stub'")
        page.wait("document.querySelector('.tile b').textContent === '0'")
        ask(page, "hello")
        assert page.run(
            "document.querySelector('#notice').hidden && document.querySelector('.error[role=alert]').hidden"
        )
        assert page.run("[localStorage.length, document.cookie, Object.values(sessionStorage)]") == [0, "", ["secret"]]
        assert all("401" in error for error in page.errors)
        page.close()


@in_chromium
def test_markdown_becomes_nodes_and_never_more(browser: Browser, server: LiveServer) -> None:
    with opened(browser, f"{server.url}/") as page:
        page.run("""import('./playground/text/markdown.js').then(({ MarkdownView }) => {
            const box = document.createElement("div");
            window.shown = (text) => { new MarkdownView(box).show(text); return box.innerHTML; };
            window.spent = (text) => {
                const began = performance.now();
                shown(text);
                return performance.now() - began;
            };
            window.grown = (text) => {
                const view = new MarkdownView(box);
                for (let i = 1; i <= text.length; i += 1) view.show(text.slice(0, i));
                return box.innerHTML;
            };
        })""")
        for text, html in MARKDOWN.items():
            assert page.run(f"shown({json.dumps(text)})") == html, text
        whole = "\n\n".join(MARKDOWN) + "\n```js\nlet x = '<b>';\n"
        assert page.run(f"grown({json.dumps(whole)}) === shown({json.dumps(whole)})")
        code = page.run("shown('```py\\nx = \"<b>\"\\n```\\nafter')")
        assert (
            "<span>py</span>" in code
            and '<code>x = <span class="hl-s">"&lt;b&gt;"</span></code>' in code
            and code.endswith("<p>after</p>")
        )
        for unit in ("*", "**a", "`", "[", "[a](", "> ", "- ", "_a ", "~~", "|-", "```\n", "\\", "http://", "1. a\n  "):
            assert page.run(f"spent({json.dumps(unit)}.repeat(20000))") < 3000, unit


MARKDOWN = {
    "<script>alert(1)</script>": "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](data:text/html,x)": "<p>[x](data:text/html,x)</p>",
    "![a](https://a.b/c.png)": '<p><a href="https://a.b/c.png" target="_blank" rel="noopener noreferrer">a</a></p>',
    "see https://a.b/c.": (
        '<p>see <a href="https://a.b/c" target="_blank" rel="noopener noreferrer">https://a.b/c</a>.</p>'
    ),
    "# One\ntext": "<h3>One</h3><p>text</p>",
    "**bold**, *soft*, ~~gone~~, `a*b*`": (
        "<p><strong>bold</strong>, <em>soft</em>, <del>gone</del>, <code>a*b*</code></p>"
    ),
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "calls __next__() of __iter__, __a b__ c": "<p>calls __next__() of __iter__, <strong>a b</strong> c</p>",
    "a\nb": "<p>a<br>b</p>",
    "- a\n- b\n  - c": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
    "---": "<hr>",
    "|a|b|\n|-|-|\n|1|2|": (
        '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>"
    ),
}


@in_chromium
def test_figures_are_read_as_prometheus_reads_them(browser: Browser, server: LiveServer) -> None:
    with opened(browser, f"{server.url}/") as page:
        text = "\n".join([
            "# HELP x y", 'a{m="1",n="q\\"}"} 2', 'a{m="2"} 3.5', "b 7",
            *(f'h_bucket{{le="{le}",m="{m}"}} {n}' for m in "12" for le, n in (("1.0", 1), ("2.0", 3), ("+Inf", 4))),
        ])  # fmt: skip
        found = page.run(f"""import('./playground/metrics.js').then((m) => {{
            const metrics = m.parse({json.dumps(text)});
            const h = m.histogram(metrics, "h");
            return [m.total(metrics, "a"), m.largest(metrics, "a"), m.total(metrics, "b"), m.total(metrics, "none"),
                h.map(([, count]) => count), m.quantile([], h, 0.5), m.quantile([], h, 0.99), m.quantile(h, h, 0.5)];
        }})""")
        assert found == [5.5, 3.5, 7, 0, [2, 6, 8], 1.5, 2, None]


@in_chromium
def test_a_phone_sees_everything(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server, 390, 844) as page:
        assert page.run("document.querySelector('#settings').hidden && document.querySelector('#figures').hidden")
        ask(page, "What does shutil.copytree do?")
        page.click("#toggle-compare")
        for panel in ("settings", "figures", "settings"):
            page.click(f"#toggle-{panel}")
            assert page.run(WIDE) == []
        page.key("Escape")
        assert page.run("document.querySelector('#settings').hidden")
        assert page.run(WIDE) == []


WIDE = """[...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && (box.left < -1 || box.right > innerWidth + 1);
}).map((node) => node.outerHTML.slice(0, 99))"""
"""What sticks out of the window."""


@in_chromium
def test_it_works_below_a_path(browser: Browser) -> None:
    with (
        live(root_path="/quire") as server,
        shown_below("/quire", server.url) as url,
        opened(browser, f"{url}/") as page,
    ):
        page.wait("document.querySelector('.model').value === 'stub'")
        ask(page, "hello")
        assert page.text(".markdown")
