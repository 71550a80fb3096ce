"""The page of `quire dashboard` opens on what the rows say, in a sentence and as bars."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_dashboard import STICKS_OUT, opened

from browser import CHROMIUM, Browser
from quire.dashboard.gather import File
from quire.dashboard.page import page
from synthetic_rows import suite, synthetic


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
def test_it_opens_on_what_the_rows_say(tmp_path: Path) -> None:
    written, alone = tmp_path / "two.html", tmp_path / "page.html"
    written.write_bytes(page([File("one.jsonl", suite()), File("two.jsonl", suite(1.2))]))
    with Browser() as browser:
        with opened(browser, written) as found:
            assert found.run("document.querySelector('#tab-summary').getAttribute('aria-selected')") == "true"
            lead = found.text(".lead")
            assert lead.startswith("prefix-cache gives most: 2 times the output tokens (tokens/s) ("), lead
            assert "int8 instead of bfloat16" in found.text(".bars") and "1.8\u00d7" in found.text(".bars")
            assert "two.jsonl instead of one.jsonl" in found.text(".bars") and "1.2\u00d7" in found.text(".bars")
            found.click(".bars button")
            found.wait("document.querySelector('#details').open")
        with opened(browser, written, "", 390, True) as found:
            assert found.run(STICKS_OUT) == []
        alone.write_bytes(page([File("a.jsonl", [synthetic(10.0), synthetic(30.0, batch=8)])]))
        with opened(browser, alone) as found:
            assert "Fastest of 2 rows: 30 tokens/s" in found.text(".lead") and "Slowest: 10 tokens/s" in found.text(
                ".lead"
            )
