"""A headless Chromium that tests drive over two pipes: the DevTools protocol, which needs no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes to 4."""
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
)  # fmt: skip
KEYS = {
    "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9,
    " ": 32, "?": 191, ",": 188, "/": 191,
}  # fmt: skip
CODES = {" ": "Space", "?": "Slash", "/": "Slash", ",": "Comma"}
WRITTEN = {"Enter": "\r", " ": " ", "?": "?", "/": "/", ",": ","}
ANSWER_SECONDS = 60.0


def _pipe() -> tuple[int, int]:
    """Ends above the descriptors that they are moved to."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """One browser, until the end of a `with`."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="quire-chromium-")
        read, self._commands = _pipe()
        self._answers, write = _pipe()
        flags = [*FLAGS, f"--user-data-dir={self.folder}", "about:blank"]
        command = [sys.executable, "-c", START, str(read), str(write), CHROMIUM, *flags]
        self.process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            found = self._message(end - time.monotonic())
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _message(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], max(0.0, seconds))[0], "Chromium does not answer"
            data = os.read(self._answers, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def page(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """A page that has loaded, in a context of its own; width and height in CSS pixels."""
        return Page(self, url, width, height, dark)


class Page:
    """A tab. `errors`: what its console complained of so far."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
        self.browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def close(self) -> None:
        """Close the tab."""
        self.browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of this tab."""
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> None:
        """Until an expression holds."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"{script} did not come true: {self.run('document.body.innerText')}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        """The text that is seen of an element."""
        found: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def _middle(self, selector: str) -> dict[str, float]:
        """The middle of the first element that is seen."""
        script = f"""(() => {{
            const node = [...document.querySelectorAll({json.dumps(selector)})].find((n) => n.getClientRects().length);
            node.scrollIntoView({{block: "nearest"}});
            const box = node.getClientRects()[0];
            return {{x: box.x + box.width / 2, y: box.y + box.height / 2}};
        }})()"""
        found: dict[str, float] = self.run(script)
        return found

    def click(self, selector: str) -> None:
        """With the mouse."""
        at = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def hover(self, selector: str) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str, shift: bool = False, ctrl: bool = False) -> None:
        """Press a key: one of `KEYS`, or a letter."""
        letter = len(name) == 1 and name.isalpha()
        code = f"Key{name.upper()}" if letter else CODES.get(name, name)
        number = ord(name.upper()) if letter else KEYS[name]
        facts = {"key": name, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 * shift + 2 * ctrl}
        text = {"text": WRITTEN[name]} if name in WRITTEN and not ctrl else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def fill(self, selector: str, value: str) -> None:
        """Give a field a value, as somebody who leaves it."""
        names = json.dumps([selector, value])
        self.run(f"""(([selector, value]) => {{
            const node = document.querySelector(selector);
            node.value = value;
            node.dispatchEvent(new Event("input", {{bubbles: true}}));
            node.dispatchEvent(new Event("change", {{bubbles: true}}));
        }})({names})""")

    def picture(self, path: Path) -> None:
        """What is seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _told(self, method: str) -> list[dict[str, Any]]:
        events = (e for e in self.browser.events if e.get("sessionId") == self.session)
        return [event["params"] for event in events if event["method"] == method]

    @property
    def errors(self) -> list[str]:
        """Exceptions, errors and warnings of the console."""
        self.run("0")  # what was said before this is here now
        said = [f"{call['type']}: {call['args']}" for call in self._told("Runtime.consoleAPICalled")
                if call["type"] in ("error", "warning", "assert")]  # fmt: skip
        thrown = [str(e["exceptionDetails"]) for e in self._told("Runtime.exceptionThrown")]
        logged = [f"{e['entry']['text']} {e['entry'].get('url', '')}" for e in self._told("Log.entryAdded")
                  if e["entry"]["level"] in ("error", "warning")]  # fmt: skip
        return said + thrown + logged

    @property
    def loaded(self) -> dict[str, int]:
        """Bytes that came for each address, headers with them."""
        addresses = {e["requestId"]: e["request"]["url"] for e in self._told("Network.requestWillBeSent")}
        return {
            addresses[e["requestId"]]: int(e["encodedDataLength"])
            for e in self._told("Network.loadingFinished")
            if e["requestId"] in addresses
        }
