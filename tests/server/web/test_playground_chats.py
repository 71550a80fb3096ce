"""The page at `/`: chats that are kept, branches, presets, and the request as code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from browser import Browser, Page
from live_server import LiveServer, live
from playground_page import DONE, ask, chatting, in_chromium
from playground_page import browser as browser
from playground_page import server as server

FIRST, SECOND, THIRD = "What does json.dumps do?", "What is math.gcd?", "Describe os.path.join."
TITLES = "[...document.querySelectorAll('.chat .title')].map((node) => node.textContent)"
SAID = "[...document.querySelectorAll('.lane:not([hidden]) :is(.question, .markdown)')].map((node) => node.innerText)"


def reload(page: Page) -> None:
    """The same page again, with its models and its list."""
    page.run("window.old = true")
    page.call("Page.reload")
    page.wait("!window.old && document.querySelector('.model')?.value")


def stopped(page: Page) -> None:
    """Until no request runs."""
    page.wait(f"{DONE} && document.querySelector('#stop').hidden")


@in_chromium
def test_history_survives_a_reload(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.wait("document.querySelector('#history').innerText.includes('kept in this browser')")
        page.fill("[name=system]", "Be brief.")
        ask(page, FIRST)
        ask(page, SECOND)
        said = page.run(SAID)
        page.wait(f"{TITLES}.length === 1")
        reload(page)
        page.wait("document.querySelectorAll('.answer').length === 2")
        assert page.run(SAID) == said and page.run(TITLES) == [FIRST]
        assert page.run("document.querySelector('[name=system]').value") == "Be brief."
        assert page.text(".stats").startswith("17 tokens")
        ask(page, THIRD)
        page.click("#new-chat")
        assert page.run("location.hash") == "" and page.run(SAID) == []
        ask(page, SECOND)
        page.wait(f"{TITLES}.length === 2")
        assert page.run(TITLES) == [SECOND, FIRST], "the latest comes first"
        page.click(".chat:not(.current) .title")
        page.wait("document.querySelectorAll('.answer').length === 3")
        assert page.run("document.querySelector('.chat.current .title').textContent") == FIRST


@in_chromium
def test_a_chat_is_searched_renamed_deleted_and_brought_back(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        ask(page, FIRST)
        page.click("#new-chat")
        ask(page, SECOND)
        page.wait(f"{TITLES}.length === 2")
        page.fill("#search", "a json FORMATTED")
        assert page.run(TITLES) == [FIRST], "the words of answers are searched too"
        page.fill("#search", "nothing of this")
        assert page.run(TITLES) == [] and "No chat has these words" in page.text("#history")
        page.fill("#search", "")
        page.click(".chat.current .more")
        page.click("#chat-menu button:nth-child(1)")
        page.run("document.querySelector('.renaming').value = 'Divisors'")
        page.key("Enter")
        page.wait(f"{TITLES}.includes('Divisors')")
        ask(page, THIRD)
        page.wait(f"{TITLES}[0] === 'Divisors'")
        page.click(".chat.current .more")
        page.click("#chat-menu button:nth-child(4)")
        page.wait(f"{TITLES}.length === 1")
        assert page.run(SAID) == [] and "Deleted “Divisors”." in page.text("#toast")
        page.click("#toast button")
        page.wait("document.querySelectorAll('.answer').length === 2")
        assert page.run(TITLES) == ["Divisors", FIRST]


@in_chromium
def test_messages_are_edited_and_branch(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        ask(page, FIRST)
        ask(page, SECOND)
        whole = page.run(SAID)
        page.click(".mine .edit")
        page.fill(".anew", THIRD)
        page.run("document.querySelector('.anew').focus()")
        page.key("Enter")
        page.wait("document.querySelectorAll('.answer').length === 1")
        stopped(page)
        assert page.text(".question") == THIRD and "Join two or more" in page.text(".markdown")
        assert page.text(".mine .place") == "2 / 2"
        page.click("[aria-label='Previous version']")
        assert page.run(SAID) == whole, "what was said before is a branch"
        page.click(".answer .again")
        page.wait("document.querySelectorAll('.answer').length === 1")
        stopped(page)
        assert page.text(".answer .place") == "2 / 2", "an answer in the middle is asked for again"
        page.wait(f"{TITLES}.length === 1")
        reload(page)
        page.wait("document.querySelectorAll('.answer').length === 1")
        page.click(".answer [aria-label='Previous version']")
        page.click(".mine [aria-label='Next version']")
        assert page.text(".question") == THIRD
        page.click(".mine [aria-label='Previous version']")
        assert page.run(SAID) == whole


@in_chromium
def test_files_of_chats_are_read_again(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        ask(page, FIRST)
        page.wait(f"{TITLES}.length === 1")
        found = page.run("""(async () => {
            const { asJson, asMarkdown, fromJson } = await import("./playground/storage/exchange.js");
            const { Store } = await import("./playground/storage/store.js");
            const records = await new Store().all("chats");
            const again = fromJson(asJson(records));
            const images = ["https://a.b/c.png", "data:image/png;base64,AA"];
            const evil = {id: 1, parent: 1, role: "user", text: {}, images};
            const odd = fromJson(JSON.stringify({format: "quire-chats", chats: [{title: 5, lanes: [{tree: {
                nodes: [evil, {...evil, id: 2, parent: null}, {id: 3, role: "system"}], chosen: {root: 2, 2: 9}}}]}]}));
            const said = [["system", "S"], ["user", "Q"]].map(([role, content]) => ({role, content}));
            const plain = fromJson(JSON.stringify({messages: said}));
            const wrong = ["{", "[]", '{"format": "quire-chats", "chats": [{}]}'].map((text) => {
                try { return fromJson(text); } catch (error) { return error.message; }
            });
            return {again, records, markdown: asMarkdown(records[0]), odd, plain, wrong};
        })()""")
        assert found["again"][0]["id"] != found["records"][0]["id"], "an import replaces nothing"
        assert found["again"][0]["lanes"][0]["tree"]["nodes"][0]["text"] == FIRST
        assert f"# {FIRST}\n\n**You**\n\n{FIRST}\n\n**pydoc**\n\nSerialize" in found["markdown"]
        node = {"id": 2, "parent": None, "role": "user", "text": "", "images": ["data:image/png;base64,AA"]}
        assert found["odd"][0]["lanes"][0]["tree"] == {"nodes": [node], "chosen": {"root": 2}}
        assert found["plain"][0]["lanes"][0]["settings"] == {"system": "S"}
        assert "not JSON" in found["wrong"][0] and "messages" in found["wrong"][1] and "chat 1" in found["wrong"][2]


@in_chromium
def test_presets_and_the_models_own_defaults(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.wait("document.querySelector('[name=max_tokens]').placeholder === '128'")
        assert page.run("document.querySelector('[name=temperature]').placeholder") == "0"
        own = "[...document.querySelectorAll('[name=max_tokens]')].every((node) => node.placeholder === '128')"
        page.wait(own)
        page.fill("#preset", "Creative")
        assert page.run("document.querySelector('[name=temperature]').value") == "1.1"
        page.fill("[name=system]", "Answer as a poem.")
        assert page.run("document.querySelector('#preset').selectedOptions[0].textContent") == "Changed by hand"
        page.click("#preset-save")
        page.type("Poet")
        page.key("Enter")
        page.wait("document.querySelector('#preset').value === 'Poet'")
        page.fill("#preset", "The model's defaults")
        assert page.run("document.querySelector('[name=system]').value") == ""
        reload(page)
        page.wait("document.querySelector('#preset optgroup')")
        page.fill("#preset", "Poet")
        assert page.run("document.querySelector('[name=system]').value") == "Answer as a poem."
        page.click("#preset-remove")
        assert page.run("document.querySelector('#preset optgroup')") is None


@in_chromium
@pytest.mark.slow
def test_the_request_as_code_runs(browser: Browser, server: LiveServer) -> None:
    with chatting(browser, server) as page:
        page.fill("[name=max_tokens]", "9")
        page.fill("[name=min_p]", "0.05")
        page.fill("[name=system]", 'It\'s "so":\n$HOME \\ é')
        page.fill("#message", FIRST)
        page.click("#show-code")
        command = page.run("document.querySelector('#code code').textContent")
        assert page.run("document.activeElement.closest('dialog') !== null")
        reply = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(reply.stdout)["usage"]["completion_tokens"] == 9
        page.click("#code .tabs button:nth-child(2)")
        program = page.run("document.querySelector('#code code').textContent")
        assert 'extra_body={"min_p": 0.05}' in program and "Authorization" not in command
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout.strip() == json.loads(reply.stdout)["choices"][0]["message"]["content"].strip()
        page.key("Escape")
        assert not page.run("document.querySelector('#code').open")


@in_chromium
def test_calls_of_tools_are_shown_and_answered(browser: Browser) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    with live() as server, chatting(browser, server) as page:
        page.run(f"""(() => {{
            window.bodies = [];
            const real = window.fetch;
            window.fetch = (url, init) => {{
                if (!String(url).endsWith("/chat/completions")) return real(url, init);
                bodies.push(JSON.parse(init.body));
                const calls = {json.dumps([call, rest])}.map((each) => ({{tool_calls: [each]}}));
                const first = [{{reasoning_content: "Hm."}}, ...calls];
                const deltas = bodies.length > 1 ? [{{content: "It is sunny."}}] : first;
                const chunks = deltas.map((delta) => JSON.stringify({{choices: [{{delta}}]}}));
                const text = chunks.map((chunk) => `data: ${{chunk}}\\n\\n`).join("");
                return Promise.resolve(new Response(`${{text}}data: [DONE]\\n\\n`));
            }};
        }})()""")
        page.run("[...document.querySelectorAll('button')].find((n) => n.textContent === 'Write an example').click()")
        ask(page, "The weather of Paris?")
        assert page.text(".call h3") == "Calls get_weather" and json.loads(page.text(".call pre")) == {"city": "Paris"}
        assert page.run("!document.querySelector('.thinking').open && !document.querySelector('.thinking').hidden")
        page.fill(".results textarea", "sunny")
        page.click(".results button")
        page.wait("document.querySelectorAll('.answer').length === 2")
        stopped(page)
        bodies: list[dict[str, Any]] = page.run("window.bodies")
        assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
        said = bodies[1]["messages"]
        assert [m["role"] for m in said] == ["user", "assistant", "tool"]
        assert said[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert said[2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
        assert page.text(".answer:last-child .markdown") == "It is sunny."
