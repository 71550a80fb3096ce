"""Pictures of both dashboards for the documents: `python tests/support/dashboard_pictures.py FOLDER ROWS...`.

ROWS are files of measured rows, as `tests/support/dashboard_rows.py` writes them; the live page shows the embedded
model under the playground's traffic.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from pathlib import Path

from browser import Browser
from playground_pictures import traffic
from quire.dashboard.gather import gather
from quire.dashboard.page import page
from real_server import real

VIEWS = {
    "curves": "view=curves&f.benchmark=latency",
    "techniques": "view=techniques",
    "compare": "view=compare",
    "best": "view=best&t.ttft=40&t.tpot=1",
    "roofline": "view=roofline&roofby=model.format",
    "pareto": "view=pareto",
}
LIVE_SECONDS = 75


def shown(browser: Browser, path: Path, folder: Path) -> None:
    """Views of the page, one of them in the dark, on a phone, and with a row open."""
    address = path.as_uri()
    pictures = [(name, state, 1280, False) for name, state in VIEWS.items()]
    pictures += [("dark", VIEWS["roofline"], 1280, True), ("phone", VIEWS["curves"], 390, False)]
    for name, state, width, dark in pictures:
        found = browser.page(f"{address}#{state}", width, 844, dark)
        found.wait("document.querySelector('#loading').hidden")
        time.sleep(0.3)
        found.picture(folder / f"{name}.png")
        found.close()
    found = browser.page(f"{address}#view=explore&lines=1&facet=file")
    found.wait("document.querySelector('.field canvas')")
    found.run("document.querySelector('.field').focus()")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        found.key(key)
    found.picture(folder / "row.png")
    found.close()


def live(browser: Browser, folder: Path) -> None:
    """The live page in daylight, in the dark and on a phone."""
    stopped = threading.Event()
    with real(speculative_config='{"method": "ngram"}') as server:
        thread = threading.Thread(target=traffic, args=(server, stopped))
        thread.start()
        found = browser.page(f"{server.url}/dashboard", 1280, 900)
        found.run("document.querySelector('#span').value = '120'")
        server.post("/v1/completions", {"prompt": "x", "n": 10_000})
        time.sleep(LIVE_SECONDS)
        logging.getLogger("quire.engine").warning("this picture was taken")
        time.sleep(2)
        found.picture(folder / "live.png")
        found.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        time.sleep(1.5)
        found.picture(folder / "live-dark.png")
        found.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        time.sleep(1.5)
        found.picture(folder / "live-phone.png")
        stopped.set()
        thread.join()
        found.close()


def main(folder: Path, rows: list[Path]) -> None:
    """All of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept, Browser() as browser:
        path = Path(kept) / "page.html"
        path.write_bytes(page(gather(rows)))
        shown(browser, path, folder)
        live(browser, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
