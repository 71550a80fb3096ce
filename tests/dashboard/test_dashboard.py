"""`quire dashboard`: what is written and served, and what people see and do in a real browser."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from accessibility import violations, with_axe
from browser import Browser
from dashboard_page import STICKS_OUT, in_chromium, opened
from dashboard_page import browser as browser
from quire.cli.app import app
from quire.core.errors import QuireError
from quire.dashboard.gather import File, gather
from quire.dashboard.page import DISTINCT, MODULES, UPLOT, WEB, joined, packed, page
from quire.dashboard.serve import server
from quire.figures.files import write_rows
from quire.figures.schema import FigureRow
from quire.figures.statistics import compare, interval
from synthetic_rows import NASTY, suite, synthetic

VIEWS = ("summary", "explore", "curves", "best", "techniques", "compare", "roofline", "pareto", "cost", "rows")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs, of which the second is a fifth faster."""
    folder = tmp_path_factory.mktemp("page")
    write_rows(folder / "one.jsonl", suite())
    write_rows(folder / "two.jsonl", suite(1.2))
    assert run(str(folder), "-o", str(folder / "page.html"))[0] == 0
    return folder / "page.html"


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed or is wrong."""
    found = CliRunner().invoke(app, ["dashboard", *arguments])
    if isinstance(found.exception, QuireError):
        return found.exception.exit_code, found.exception.message
    return found.exit_code, found.output


def test_the_page_is_whole_and_asks_nobody(written: Path) -> None:
    html = written.read_text()
    assert len(html) < 250_000
    own = html.replace("https://github.com/leeoniya/uPlot", "").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", own), "an address elsewhere"
    [policy] = re.findall(r'content-security-policy" content="([^"]+)"', html)
    assert (
        "connect-src &#x27;none&#x27;" in policy and "unsafe" not in policy and "default-src &#x27;none&#x27;" in policy
    )
    for tag in ("script", "style"):
        for text in re.findall(rf"<{tag}(?: type=\"module\")?>(.*?)</{tag}>", html, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"sha256-{digest}" in policy, tag


def test_the_scripts_are_short_and_parse_no_markup() -> None:
    assert set(WEB.glob("*.js")) <= set(MODULES)
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 400 and max(map(len, text.splitlines())) <= 200, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), (
            path.name
        )
    assert (
        "MIT" in (UPLOT[0].parent / "LICENSE").read_text() and "1.6.32" in (UPLOT[0].parent / "README.md").read_text()
    )


def test_rows_come_back_as_they_were() -> None:
    rows = [*suite(), synthetic(math.pi, metrics={"kl": math.nan, "peak_bytes": 2.0**40 + 1, "perplexity": 1e300})]
    found = msgspec.json.decode(gzip.decompress(base64.b64decode(packed([File("a", rows[:3]), File("b", rows[3:])]))))
    names = found["names"]
    for row, (file, line, places, metrics, intervals, samples) in zip(rows, found["rows"], strict=True):
        assert (found["files"][file], line) == (("a", rows.index(row)) if file == 0 else ("b", rows.index(row) - 3))
        for name, place in zip(DISTINCT, places, strict=True):
            assert found["values"][name][place] == msgspec.to_builtins(getattr(row, name)), name
        told = {n: v for n, v in zip(names[metrics[0]], metrics[1:], strict=True) if v is not None}
        assert told == pytest.approx({n: v for n, v in row.metrics.items() if v == v}, rel=1e-6)
        assert list(row.intervals) == names[intervals[0]] and list(row.samples) == names[samples[0]]
        assert samples[1:] == [pytest.approx(values, rel=1e-6) for values in row.samples.values()]
    assert found["rows"][-1][3][-2] == 2**40 + 1


def test_the_command_writes_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    write_rows(tmp_path / "results" / "a.jsonl", suite())
    write_rows(tmp_path / "results" / "b.parquet", suite())
    code, said = run("results")
    assert code == 0 and re.match(r"dashboard\.html: 30 rows of 2 files, [\d.]+ KiB; open it", said)
    assert [file.name for file in gather([Path("results")])] == ["a.jsonl", "b.parquet"]
    assert run("results", "results/a.jsonl")[0] == 0, "a page of ours makes room for another; a file counts once"
    (tmp_path / "dashboard.html").write_text("<p>by hand")
    assert "no page of quire's" in run("results")[1] and (tmp_path / "dashboard.html").read_text() == "<p>by hand"


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    good, bad, empty, folder = (tmp_path / name for name in ("good.jsonl", "bad.jsonl", "empty.jsonl", "folder"))
    write_rows(good, suite())
    bad.write_text('{"kind": "measured"}\n')
    empty.write_text("")
    folder.mkdir()
    (tmp_path / "page.txt").write_text("x")
    for arguments, said in (
        ((str(tmp_path / "none.jsonl"),), "no such file"),
        ((str(tmp_path / "page.txt"),), "rows lie in files that end with"),
        ((str(folder),), "holds no file of rows"),
        ((str(bad),), "line 1 is no row"),
        ((str(empty),), "no rows"),
        ((str(good), "-o", str(good)), "one of the files to read"),
        ((str(good), "-o", str(tmp_path / "no" / "page.html")), "No such file"),
        ((str(good), "-o", str(folder)), "directory"),
        ((str(good), "-o", "page.html", "--serve"), "give one"),
        ((str(good), "--serve", "--port", "99999"), "--port 99999"),
    ):
        code, message = run(*arguments)
        assert code == 2 and said in message and "Traceback" not in message, (arguments, message)
    assert len(gather([good])[0].rows) == len(suite())


@contextlib.contextmanager
def serving(*paths: Path) -> Iterator[str]:
    running = server(paths, 0)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}/"
    finally:
        running.shutdown()
        thread.join(5)
        running.server_close()


def test_it_serves_files_as_they_are_now(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, suite())
    with serving(tmp_path) as url, httpx.Client(base_url=url) as http:
        stamp = http.get("/state").json()["stamp"]
        assert f'data-stamp="{stamp}"' in http.get("/").text
        write_rows(path, [*suite(), synthetic(3.0)])
        after = http.get("/state").json()["stamp"]
        assert after != stamp and f'data-stamp="{after}"' in http.get("/").text
        path.write_text("nonsense\n")
        broken = http.get("/")
        assert broken.status_code == 500 and "not JSON" in broken.text
        path.unlink()
        assert "holds no file" in http.get("/state").json()["error"]
        assert http.get("/etc/passwd").status_code == 404
        assert http.get("/state", headers={"host": "evil.example"}).status_code == 421


@in_chromium
def test_every_view_shows_what_there_is(browser: Browser, written: Path) -> None:
    with opened(browser, written) as found:
        assert found.text("#count") == "30 rows"
        for view in VIEWS:
            found.click(f"#tab-{view}")
            assert found.run("document.querySelector('#result').childElementCount") > 0, view
            assert found.run(f"document.querySelector('#tab-{view}').getAttribute('aria-selected')") == "true"
            assert found.run(f"new URLSearchParams(location.hash.slice(1)).get('view') === '{view}'")
            assert found.run(STICKS_OUT) == [], view
            if view not in ("summary", "cost", "best", "rows", "compare", "techniques"):
                found.wait("document.querySelector('#result canvas')")
        assert all(url.startswith(("file:", "data:")) for url in found.loaded)


@in_chromium
@with_axe
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_axe_finds_nothing(browser: Browser, written: Path, dark: bool, width: int) -> None:
    with opened(browser, written, width=width, dark=dark) as found:
        for view in VIEWS:
            found.click(f"#tab-{view}")
            assert violations(found) == [], view
        found.click("#tab-rows")
        found.run("document.querySelector('#result tbody tr button, #result tbody tr').click()")
        assert violations(found) == []


@in_chromium
def test_the_keyboard_goes_from_point_to_point_and_opens_a_row(browser: Browser, written: Path) -> None:
    with opened(browser, written, "view=explore") as found:
        found.wait("document.querySelector('.field canvas')")
        found.run("document.querySelector('.field').focus()")
        found.key("ArrowRight")
        first = found.text(".tip")
        assert re.search(r"output tokens \(tokens/s\): [\d.]+ tokens/s \([\d.]+ to [\d.]+\)", first)
        found.key("ArrowRight")
        assert found.text(".tip") != first and found.run("document.querySelector('[aria-live]').textContent") != ""
        found.key("Enter")
        found.wait("document.querySelector('#details').open")
        assert "quire bench latency --batch-size" in found.text("#details .command code")
        assert "load.batch" in found.text("#details") and "2026-01-02T03:04:05Z" in found.text("#details")
        found.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        found.click("#details .command button")
        found.wait("document.querySelector('#details .command button').textContent === 'Copied'")
        assert found.run("window.copied") == found.text("#details .command code")
        assert "row=" in found.run("location.hash")
        found.key("Escape")
        found.wait("!document.querySelector('#details').open && !location.hash.includes('row=')")


@in_chromium
def test_a_link_keeps_the_view(browser: Browser, written: Path) -> None:
    state = "view=explore&y=ttft_ms_p50&x=load.batch&facet=model.format&logy=1&f.kind=measured&f.kind=imported"
    with opened(browser, written, f"{state}&row=one.jsonl.0") as found:
        assert found.text("#count") == "28 of 30 rows" and found.run("document.querySelector('#details').open")
        assert found.run("document.querySelectorAll('figure').length") == 2
        assert found.run("[...document.querySelectorAll('#controls select')].map((node) => node.value)") == [
            "load.batch", "ttft_ms_p50", "engine.name", "model.format",
        ]  # fmt: skip
        found.key("Escape")
        found.wait("!document.querySelector('#details').open")
        found.run("document.querySelector('#filters input:checked').click()")
        assert found.text("#count") != "28 of 30 rows"
        found.click("#tab-rows")
        found.run("history.back()")
        found.wait("document.querySelector('#tab-explore').ariaSelected === 'true'")
        found.run("location.hash = '#view=rows&f.engine.name=vllm'")
        found.wait("document.querySelector('#count').textContent === '4 of 30 rows'")
        assert found.run("document.querySelectorAll('#result tbody tr').length") == 4


@in_chromium
def test_the_best_for_targets(browser: Browser, written: Path) -> None:
    with opened(browser, written, "view=best&f.engine.name=quire&f.benchmark=latency&f.kind=measured") as found:
        found.fill("#c-t\\.tpot", "70")
        assert "ranked by most output tokens/s" in found.text("[role=status].answer")
        speeds = found.run("[...document.querySelectorAll('tbody td:nth-child(2)')].map((n) => Number(n.textContent))")
        assert speeds == sorted(speeds, reverse=True) and 12 >= len(speeds) > 3
        tpots = found.run("[...document.querySelectorAll('tbody tr')].map((n) => Number(n.cells[2].textContent))")
        assert all(value <= 70 for value in tpots)
        found.fill("#c-t\\.tpot", "0.001")
        assert "None meets" in found.text("#result") and found.run("document.querySelectorAll('tbody tr').length") == 10
        found.fill("#c-t\\.tpot", "")
        found.fill("#c-price", "2")
        found.fill("#c-goal", "cost")
        best = max(faster * 18 * 8**0.8 for faster in (1, 1.2))
        best = max(best, 48.0)
        cost = float(found.run("document.querySelector('tbody td:nth-child(2)').textContent"))
        assert cost == pytest.approx(2e6 / 3600 / best, rel=1e-3)


@in_chromium
def test_what_techniques_buy_beside_what_is_claimed(browser: Browser, written: Path) -> None:
    with opened(browser, written, "view=techniques") as found:
        lines = found.run("[...document.querySelectorAll('tbody tr')].map((n) => n.innerText)")
        assert len(lines) == 2 and all("prefix-cache" in line and "2-3x, as its authors say" in line for line in lines)
        assert all(re.search(r"\t2\u00d7\t", line) and "yes" in line for line in lines)
        assert found.run("document.querySelectorAll('.ratio.pays').length") == 2
        found.fill("#c-metric", "tpot_ms_p50")
        assert found.run("document.querySelector('tbody').innerText").count("0.5\u00d7") == 2
        assert found.run("document.querySelectorAll('.ratio.pays').length") == 2, "less time is better"


@in_chromium
def test_two_runs_side_by_side(browser: Browser, written: Path) -> None:
    with opened(browser, written, "view=compare&of=output_tokens_per_s") as found:
        assert found.text("#c-side") and "15 pairs" in found.text("#result")
        assert re.search(r"1\.1\d+\u00d7", found.text(".tiles")) and "B better" in found.text(".tiles")
        words = found.run("[...document.querySelectorAll('tbody tr')].map((n) => n.innerText)")
        assert (
            sum("B is better" in line for line in words) == 10 and sum("too few rounds" in line for line in words) == 3
        )
        found.fill("#c-side", "model.format")
        assert found.run("[...document.querySelector('#c-a').options].map((n) => n.value)") == ["bfloat16", "int8"]
        assert "alike but for model.format" in found.text("#result")


@in_chromium
def test_roofs_pareto_and_cost(browser: Browser, written: Path) -> None:
    with opened(browser, written, "view=roofline&f.kind=measured") as found:
        assert "reading 20 GB/s, bf16 products 1 TFLOP/s, int8 products 2 Top/s" in found.text("#result")
        found.click(".as-table summary")
        found.wait("document.querySelector('.as-table tbody tr')")
        # A step of one sequence: 2 operations for each of a billion parameters, of two bytes each.
        first = found.run("[...document.querySelectorAll('.as-table tbody tr')].map((n) => n.innerText)")
        assert any("1 FLOP/B\t20 GFLOP/s" in line for line in first), first
        found.click("#tab-pareto")
        lines = found.run("[...document.querySelectorAll('.sortable tbody tr')].map((n) => n.innerText)")
        assert any("8.1" in line and line.endswith("yes") for line in lines) and any(
            line.endswith("no") for line in lines
        )
        found.click("#tab-cost")
        assert "Name a price" in found.text("#result")
        found.fill("#c-price", "3.6")
        found.wait("document.querySelector('#result canvas')")
        assert float(found.run("document.querySelector('tbody td').textContent")) == pytest.approx(
            1000 / (1.2 * 18 * 8**0.8), 1e-3
        )


@in_chromium
def test_names_break_nothing(browser: Browser, tmp_path: Path) -> None:
    rows = [synthetic(10.0 * i, suite=NASTY, technique=NASTY, command=NASTY, claim=NASTY, on=i > 1,
                      options={NASTY: i}) for i in (1, 2)]  # fmt: skip
    target = tmp_path / "page.html"
    target.write_bytes(page([File(NASTY, rows)]))
    with opened(browser, target, urlencode({"row": f"{NASTY}.0"})) as found:
        assert found.run("document.querySelector('#details').open")
        found.key("Escape")
        for view in VIEWS:
            found.run(f"document.querySelector('#tab-{view}').click()")
        found.click("#tab-techniques")
        assert "</script><img" in found.text("tbody") and found.run("document.images.length") == 0


@in_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_sees_everything(browser: Browser, written: Path, dark: bool) -> None:
    with opened(browser, written, "view=explore", 390, dark) as found:
        for view in VIEWS:
            found.run(f"document.querySelector('#tab-{view}').click()")
            assert found.run(STICKS_OUT) == [], view
        found.run("document.querySelector('#filter-box summary').click()")
        found.run("document.querySelector('tbody .link').click()")
        assert found.run("document.querySelector('#details').open") and found.run(STICKS_OUT) == []
        page_color = found.run("getComputedStyle(document.body).backgroundColor")
        assert page_color == ("rgb(21, 23, 26)" if dark else "rgb(244, 245, 247)")


@in_chromium
def test_the_browser_reckons_as_python_does(browser: Browser, written: Path) -> None:
    rng = random.Random(5)
    cases = [[[rng.lognormvariate(0, 0.2) for _ in range(n)] for n in (a, b)]
             for a, b in ((1, 1), (2, 2), (5, 5), (6, 6), (7, 7), (9, 4), (6, 8), (12, 12), (40, 40))]  # fmt: skip
    script = joined([WEB / "statistics.js"])
    with opened(browser, written) as found:
        told = found.run(f"(() => {{ {script}; return {json.dumps(cases)}.map(([a, b]) => "
                         "[$statistics.interval(a), $statistics.compare(a, b)]); })()")  # fmt: skip
    for (a, b), (ends, made) in zip(cases, told, strict=True):
        expected = compare(a, b)
        assert ends == pytest.approx(list(msgspec.structs.astuple(interval(a))))
        assert made == {"ratio": pytest.approx(expected.ratio), "low": pytest.approx(expected.interval.low),
                        "high": pytest.approx(expected.interval.high), "significant": expected.significant}  # fmt: skip


@in_chromium
def test_a_served_page_follows_its_files(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, suite())
    with serving(path) as url, opened(browser, url, "view=rows&f.kind=measured") as found:
        assert found.text("#count") == "12 of 15 rows"
        write_rows(path, [*suite(), synthetic(3.0)])
        found.wait("document.querySelector('#count')?.textContent === '13 of 16 rows'")
        assert "view=rows" in found.run("location.hash")


@pytest.mark.slow
@in_chromium
def test_fifty_thousand_rows(browser: Browser, tmp_path: Path) -> None:
    rng = random.Random(1)
    rows: list[FigureRow] = [
        synthetic(rng.lognormvariate(3, 1), batch=2 ** rng.randrange(8), fmt=rng.choice(("int8", "int4")),
                  suite=f"suite {i % 7}", technique=f"technique {i % 10}", on=i % 3 > 0)
        for i in range(50_000)
    ]  # fmt: skip
    target = tmp_path / "page.html"
    target.write_bytes(page([File("many.jsonl", rows)]))
    assert target.stat().st_size < 16 << 20
    began = time.monotonic()
    with opened(browser, target) as found:
        assert found.text("#count") == "50,000 rows" and time.monotonic() - began < 60
        for view in VIEWS:
            found.run(f"document.querySelector('#tab-{view}').click()")
            assert found.run("document.querySelector('#result').childElementCount") > 0
