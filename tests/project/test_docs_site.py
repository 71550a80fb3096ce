"""The documentation's site: it builds without a warning, links and anchors lead somewhere, and it asks nobody else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paths import ROOT

pytest.importorskip("material")

from mkdocs.exceptions import PluginError

import charts
import hooks

MADE = {
    "reference/flags.html": ('id="max-model-len"', 'id="shutdown-timeout"', "--no-enable-prefix-caching"),
    "reference/commands.html": ("quire train-heads", "--input-file", "quire bench serve"),
    "reference/fields.html": ("structured_outputs", "max_new_tokens", "num_predict"),
    "reference/metrics.html": ("vllm:time_to_first_token_seconds", "quire:expert_imbalance", "http_requests_total"),
    "reference/python.html": ("quire.search.best_of_n", "quire.LLM", "LLM.beam_search"),
    "reference/messages.html": ("owner/model", "--api-key must not be empty"),
    "coming-from.html": ("OLLAMA_NUM_PARALLEL", "--ctx-size"),
    "glossary.html": ("prefix cache",),
    "serve/apis.html": ("/v1/models/unload", "/api/chat"),
    "models/formats.html": ("IQ4_XS", "compressed-tensors", "mxfp4"),
    "measure/techniques-dashboard.html": ("a quire dashboard",),
    "measure/rows.html": ("joules_per_token", "machine.limits"),
    "compress.html": ("smoothquant", "bits_per_weight"),
    "extend/op.html": ("lora_scale",),
    "examples.html": ("os.path.join", "custom_id"),
    "operate/index.html": ("terminationGracePeriodSeconds", "RestartPreventExitStatus"),
}
"""Pages of which most is made from the code and from files, and words that are there."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout. A warning (a link, an anchor, a page without a place) is an error there."""
    if not (ROOT / "docs/images").exists():
        pytest.skip("an sdist has no pictures of the documentation")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_pages_ask_nothing_of_other_servers(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        for tag in re.findall(r"<(?:link|script|img|iframe)\b[^>]*>", page.read_text()):
            found = re.search(r'(?:src|href)="((?:https?:)?//[^"]*)"', tag)
            assert found is None, f"{page.relative_to(site)}: {tag}"


def test_what_is_made_of_the_code_is_there(site: Path) -> None:
    for name, words in MADE.items():
        page = (site / name).read_text()
        text = re.sub(r"<[^>]*>", "", page)
        assert all(word in text or word in page for word in words), name


def test_no_mark_is_left(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        marks = ("<!-- made", "<!-- code", "<!-- whole", "<!-- figure", "<!-- end -->", ".json &gt; ")
        assert not any(mark in text for mark in marks), page


PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_what_is_made_lies_in_the_page(page: Path) -> None:
    """Pages are read where the code lies, too: what they have of it is there, and as it is now (`make docs-made`)."""
    text = page.read_text()
    assert "{{" not in re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert hooks.written(text, str(page)) == text, f"{page} is old: make docs-made"


@pytest.mark.parametrize("name", charts.ALL)
def test_a_chart_is_what_the_results_say(name: str) -> None:
    assert charts.ALL[name]() == (charts.CHARTS / f"{name}.svg").read_text(), f"{name}.svg is old: make docs-made"


def test_the_site_is_built_strictly() -> None:
    """With --quiet mkdocs counts no warnings."""
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m mkdocs build" in line]
    assert "--strict" in line and "--quiet" not in line


def test_every_page_has_one_place() -> None:
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_a_mark_that_names_nothing_is_refused() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    figures = ("<!-- figure: ranks.json > steps > x as .2f -->", "<!-- figure: none.json > a as .1f -->")
    for mark in ("<!-- made: nothing -->", "<!-- code: src/quire/ops/op.py nobody -->", *figures):
        with pytest.raises(PluginError):
            hooks.on_page_markdown(mark, page=page)
    mark = "<!-- figure: ranks.json > steps > decode of 1 > ratio as .2f -->"
    assert re.fullmatch(r"\d\.\d\d\n", hooks.on_page_markdown(mark, page=page))
    assert hooks.written(f"a {mark}9.99<!-- end --> b", "x") == hooks.written(f"a {mark} b", "x")
