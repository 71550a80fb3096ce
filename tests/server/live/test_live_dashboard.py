"""The page at `/dashboard`: what a server tells of itself while it runs, and what is seen of that in a real browser."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accessibility import violations, with_axe
from browser import CHROMIUM, Browser, Page
from live_server import LiveServer, live, wait_until
from proxy import shown_below
from quire.engine.frontend.engine_metrics import EngineMetrics
from quire.engine.stats import ReplicaStats, Stats
from quire.server.http.activity import MAX_INCIDENTS, Activity
from quire.server.http.exchange import Exchange
from quire.server.http.history import MAX_MOMENTS as MOMENTS
from quire.server.keys import Tenant
from quire.server.pages import HEADERS, LIVE
from quire.server.server_options import ServerOptions
from real_server import real
from several_models import Stubs, list_of, serving
from stub_engine import StubEngine, stub_info
from tiny_model import write_tiny

in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
STICKS_OUT = """[...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && (box.left < -1 || box.right > innerWidth + 1) && !node.closest(".scroll, .u-wrap");
}).map((node) => node.outerHTML.slice(0, 99))"""
UPS = ((1, 2, 0.5), (0, 0, 0))
RANKS = "\n".join([
    *(f'quire:replica_{name}{{model_name="m",replica="{i}"}} {value}'
      for i, values in enumerate(UPS) for name, value in zip(("up", "running", "kv_usage"), values, strict=True)),
    *(f'quire:pipeline_bubble_ratio{{model_name="m",rank="{i}"}} {share}' for i, share in enumerate((0, 0.125))),
])  # fmt: skip
"""What /metrics has of two replicas, of which one is down, and of two stages."""
KEYS = {"boss": {"key": "b", "admin": True}, "guest": {"key": "g", "requests_per_minute": 1}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def state(server: LiveServer, key: str = "") -> dict[str, Any]:
    """What the server says beside metrics."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = server.http.get("/dashboard/state", headers=headers)
    assert reply.status_code == 200, reply.text
    return cast(dict[str, Any], reply.json())


def tile(page: Page, label: str) -> str:
    """The value of a tile."""
    found = (
        "[...document.querySelectorAll('#tiles li')].find((node) => node.innerText.includes(" + json.dumps(label) + "))"
    )
    return str(page.run(f"{found}.firstChild.textContent"))


def test_the_files_are_served_strictly_and_parse_no_markup() -> None:
    with live(playground=False) as server:
        page = server.http.get("/dashboard")
        assert page.headers["content-type"].startswith("text/html")
        names = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
        names += [f"dashboard/{path.name}" for path in LIVE.glob("*.js")]
        names += [f"dashboard/{name}" for name in ("api.js", "dom.js", "metrics.js")]
        sizes = [len(page.content)]
        for name in names:
            reply = server.http.get(f"/{name}")
            assert reply.status_code == 200 and {key: reply.headers[key] for key in HEADERS} == HEADERS, name
            sizes.append(len(reply.content))
        assert sum(sizes) < 120_000
    for path in LIVE.iterdir():
        text = path.read_text()
        assert text.count("\n") <= 400 and max(map(len, text.splitlines())) <= 240, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), (
            path.name
        )
        assert not re.search(r"https?://|style=|\son\w+=", text), path.name


def test_tenants_and_incidents_are_counted_and_shown_to_whom_they_concern(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(KEYS))
    with live(api_keys_file=str(keys)) as server:
        assert server.http.get("/dashboard").status_code == 200
        assert server.http.get("/dashboard/state").status_code == 401
        body = {"prompt": [9, 9, 9], "max_tokens": 5, "ignore_eos": True}
        for key, statuses in (("b", (200, 200)), ("g", (200, 429))):
            for status in statuses:
                reply = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == status
        wait_until(lambda: len(state(server, "b")["tenants"]) == 2)
        logging.getLogger("quire.engine").error("the engine fell over in /some/where")
        logging.getLogger("quire.engine").info("this is no incident")
        whole, own = state(server, "b"), state(server, "g")
        assert whole["whole"] and not own["whole"]
        numbers = ("requests", "refused", "failed", "prompt_tokens", "output_tokens", "in_flight")
        counted = {each["name"]: tuple(each[name] for name in numbers) for each in whole["tenants"]}
        assert counted == {"boss": (2, 0, 0, 6, 10, 0), "guest": (2, 1, 0, 3, 5, 0)}
        assert [each["name"] for each in own["tenants"]] == ["guest"]
        assert [each["level"] for each in whole["incidents"]] == ["error", "refused"]
        assert [each["message"] for each in own["incidents"]] == ["POST /v1/completions: 429"]
        assert whole["models"][0]["name"] == "stub" and whole["started"] <= time.time()
    logging.getLogger("quire.engine").error("nobody hears this")
    assert len(server.state.activity.incidents) == 2


def test_sequences_in_flight_and_answers_that_fail() -> None:
    stub = StubEngine()
    with live(stub) as server:
        stub.paused = True
        waiting = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "a", "n": 3}))
        waiting.start()
        wait_until(lambda: sum(each["in_flight"] for each in state(server)["tenants"]) == 3)
        stub.paused = False
        waiting.join(10)
        stub.poison = 1
        server.post("/v1/completions", {"prompt": "a"})
        wait_until(lambda: any(each["level"] == "failed" for each in state(server)["incidents"]))
        [tenant] = state(server)["tenants"]
        assert tenant["name"] == "" and tenant["failed"] == 1


def test_what_happens_again_is_one_incident_and_few_are_kept() -> None:
    activity = Activity()
    for i in range(3):
        for tenant in ("a", "b"):
            exchange = Exchange(str(i), {"type": "http", "method": "POST", "path": "/x"}, 0.0, 0.0, Tenant(tenant), 429)
            activity.see(exchange)
    assert [(each.tenant, each.count) for each in activity.incidents] == [("a", 3), ("b", 3)]
    for i in range(2 * MAX_INCIDENTS):
        activity.note("error", f"number {i}")
    assert len(activity.incidents) == MAX_INCIDENTS
    assert activity.incidents[-1].message == f"number {2 * MAX_INCIDENTS - 1}"
    activity.see(Exchange("x", {"type": "http", "method": "GET", "path": "/x"}, 0.0, 0.0, Tenant("c"), 401))
    assert "c" not in activity.tenants and activity.incidents[-1].level == "error"


def test_replicas_are_metrics_of_their_own() -> None:
    metrics = EngineMetrics(stub_info())
    replicas = (ReplicaStats(running=2, used_blocks=3, total_blocks=6), ReplicaStats(up=False, restarts=4))
    metrics.step(Stats(replicas=replicas))
    found = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith("quire:replica")
    }
    assert found["quire:replica_up", "0"] == 1 and found["quire:replica_up", "1"] == 0
    assert found["quire:replica_kv_usage", "0"] == 0.5 and found["quire:replica_restarts_total", "1"] == 4


def test_what_was_before_the_page_was_opened_is_kept() -> None:
    with live(api_key=("k",), protect_metrics=True) as server:
        assert server.http.get("/dashboard/history").status_code == 401
    with live() as server:
        wait_until(lambda: bool(server.http.get("/dashboard/history").json()["moments"]))
        past = server.http.get("/dashboard/history").json()
        place = [each["name"] for each in past["series"]].index("vllm:generation_tokens_total")
        assert past["moments"][0]["values"][place] == 0 and 0 <= past["moments"][0]["ago"] < 60
        history = server.state.history
        for _ in range(2 * MOMENTS):
            history.note(server.state.registries, 0.0)
        assert len(history.moments) == MOMENTS and len(server.http.get("/dashboard/history").content) < 200_000


@in_chromium
def test_it_shows_what_happens(browser: Browser) -> None:
    with real(speculative_config='{"method": "ngram"}') as server:
        page = browser.page(f"{server.url}/dashboard", 1280, 900)
        page.wait("document.querySelector('#health').className === 'good'")
        page.wait("performance.getEntriesByType('resource').some((one) => one.name.endsWith('/dashboard/history'))")
        for _ in range(2):
            server.complete("def f(a, b, a, b, a, b", n=2, max_tokens=40, ignore_eos=True)
            page.wait("true")
            time.sleep(1.1)
        page.wait("/\\d/.test([...document.querySelectorAll('#tiles b')][8].textContent)")
        assert re.fullmatch(r"[\d.]+ m?s", tile(page, "TTFT, median")) and re.fullmatch(
            r"[\d.]+ m?s", tile(page, "ITL, p99")
        )
        assert re.fullmatch(r"[\d.]+ %", tile(page, "Drafts accepted")) and tile(page, "Running") == "0"
        assert "pydoc" in page.text("#tables") and "everybody" in page.text("#tables")
        assert "None since the server was started" in page.text("#tables")
        logging.getLogger("quire.engine").warning("the engine is back after 1.5 s")
        page.wait("document.querySelector('#tables').innerText.includes('the engine is back after 1.5 s')")
        label = page.run("document.querySelector('#charts .field').getAttribute('aria-label')")
        assert label.startswith("Tokens per second: output ")
        assert page.run(STICKS_OUT) == []
        told = page.run(f"""Promise.all(["metrics", "tables"].map((name) => import(`./dashboard/${{name}}.js`))).then(
            ([m, t]) => {{
                const metrics = m.parse({json.dumps(RANKS)});
                return [t.replicas(metrics).innerText ?? t.replicas(metrics).textContent, t.ranks(metrics).textContent];
            }})""")
        assert "m 0up2" in told[0] and "m 1down0" in told[0] and "50.0 %" in told[0], told
        assert "m 00.0 %" in told[1] and "m 112.5 %" in told[1], told
        page.click("#pause")
        asked = len([url for url in page.loaded if url.endswith("/metrics")])
        before = sum(e["method"] == "Network.requestWillBeSent" for e in browser.events)
        time.sleep(1.3)
        page.run("0")
        assert sum(e["method"] == "Network.requestWillBeSent" for e in browser.events) == before and asked
        assert page.errors == [] and all(url.startswith(server.url) for url in page.loaded)
        page.close()


@in_chromium
@with_axe
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_axe_finds_nothing(browser: Browser, dark: bool, width: int) -> None:
    with real() as server:
        page = browser.page(f"{server.url}/dashboard", width, 844, dark)
        page.wait("document.querySelector('#health').className === 'good'")
        server.complete("x", max_tokens=3)
        page.wait("document.querySelector('#tables').innerText.includes('everybody')")
        assert violations(page) == []
        page.close()


@in_chromium
def test_it_outlives_the_server_and_fits_a_phone(browser: Browser) -> None:
    with live(StubEngine()) as first:
        page = browser.page(f"{first.url}/dashboard", 390, 844, dark=True)
        page.wait("document.querySelector('#health').className === 'good'")
        first.complete("x", max_tokens=3)
        page.wait("document.querySelector('#tables').innerText.includes('everybody')")
        assert page.run(STICKS_OUT) == []
    page.wait("document.querySelector('#health').className === 'bad'")
    assert "it is asked again every second" in page.text("#notice")
    again = LiveServer(StubEngine(), ServerOptions(port=first.port))
    again.start()
    try:
        page.wait("document.querySelector('#health').className === 'good'")
        page.wait("document.querySelector('#notice').hidden")
    finally:
        again.stop()
    page.close()


@in_chromium
def test_it_asks_for_a_key(browser: Browser) -> None:
    with live(api_key=("secret",)) as server:
        page = browser.page(f"{server.url}/dashboard")
        page.wait("document.querySelector('#notice').innerText.includes('shown to those who have a key')")
        assert tile(page, "Running") == "0", "/metrics is open unless it is protected"
        page.run("document.querySelector('#key-box').open = true")
        page.fill("#key", "secret")
        page.wait("document.querySelector('#notice').hidden && document.querySelector('#tables').innerText")
        page.close()
    with live(api_key=("secret",), protect_metrics=True) as server, shown_below("/q", server.url) as url:
        page = browser.page(f"{url}/dashboard")
        page.wait("document.querySelector('#notice').innerText.includes('wants a key')")
        assert page.run("document.querySelector('#key-box').open")
        page.close()


@in_chromium
def test_it_tells_several_models_apart(browser: Browser, tmp_path: Path) -> None:
    stubs = Stubs()
    with serving(list_of(write_tiny(tmp_path), "ab"), stubs) as several:
        several.http.post("/v1/completions", json={"model": "b", "prompt": "x", "max_tokens": 3})
        page = browser.page(f"{several.url}/dashboard")
        page.wait("document.querySelector('#model').options.length === 3")
        page.wait("document.querySelector('#tables').innerText.includes('unloaded')")
        page.fill("#model", "a")
        page.wait("document.querySelector('#model').value === 'a'")
        page.wait("[...document.querySelectorAll('#tables th[scope=row]')].every((node) => node.innerText !== 'b')")
        assert page.errors == []
        page.close()
