"""Files of Python packages on an index: the simple API as JSON (PEP 691) or HTML (PEP 503), over http or from a folder.

The indexes are those of pip or uv, as their variables and pip's configuration files name them. Nothing is installed.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import msgspec

from quire.core.errors import ModelError
from quire.store.transfer import RemoteFile, explained, local_path, open_url, shown

DEFAULT = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
MAX_PAGE_BYTES = 64 << 20
"""The largest page of an index that is read."""
PAGE_SECONDS = 15.0
"""Seconds that an index may take to reply before the next one is asked."""
PAGES = ("", "index.json", "index.html")
"""Files that may be the page of a package in a folder."""


class Indexes(NamedTuple):
    """Addresses to ask, in this order, and a file of certificate authorities to trust, or None for the system's."""

    urls: tuple[str, ...]
    certificates: str | None


def configured_indexes() -> Indexes:
    """The indexes that pip or uv would ask: by their variables, else by pip's configuration files, else pypi.org."""
    pip = _pip_settings()
    get = os.environ.get
    first = get("PIP_INDEX_URL") or get("UV_DEFAULT_INDEX") or get("UV_INDEX_URL") or pip.get("index-url") or DEFAULT
    more = get("PIP_EXTRA_INDEX_URL") or get("UV_EXTRA_INDEX_URL") or pip.get("extra-index-url", "")
    certificates = get("PIP_CERT") or pip.get("cert") or None
    return Indexes((first.strip(), *more.split()), certificates)


def _pip_settings() -> Mapping[str, str]:
    """What pip's configuration files say under [global] and [install]; later files win."""
    get, home = os.environ.get, Path.home()
    settings: dict[str, str] = {}
    if get("PIP_CONFIG_FILE") == os.devnull:
        return settings
    shared = [Path(folder) / "pip" / "pip.conf" for folder in (get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    user = Path(get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        *shared,
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        home / "Library" / "Application Support" / "pip" / "pip.conf",
        user / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
        *([Path(named)] if (named := get("PIP_CONFIG_FILE")) else []),
    ]
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue  # pip itself says what is wrong with it
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= parser.items(section)
    return settings


def find_file(package: str, filename: str, indexes: Indexes) -> RemoteFile:
    """Where the file of a package lies, on the first index that has it. Digest and size are what the index says, ""
    and None where it says nothing. `ModelError` names every index that was asked, and what each replied."""
    problems = []
    for index in indexes.urls:
        page = f"{index.rstrip('/')}/{package}/"
        try:
            for file in _files(page, indexes.certificates):
                if unquote(urlsplit(file.url).path.rpartition("/")[2]) == filename:
                    return file
            problems.append(f"{shown(index)} has other files of {package}")
        except (OSError, ValueError) as error:
            problems.append(f"{shown(index)}: {explained(error)}")
    raise ModelError(
        f"{filename} is on no Python index that was asked: {'; '.join(problems)}. Check the network, or name an index "
        "that can be reached: PIP_INDEX_URL=https://HOST/simple"
    )


def _files(page: str, certificates: str | None) -> Iterator[RemoteFile]:
    if urlsplit(page).scheme == "file":
        found = next((path for name in PAGES if (path := local_path(page) / name).is_file()), None)
        if found is None:
            raise OSError("no such package is there")
        base, data = found.absolute().as_uri(), found.read_bytes()
    else:
        with open_url(page, {"Accept": ACCEPT}, certificates, PAGE_SECONDS) as response:
            base, data = response.url, response.read(MAX_PAGE_BYTES)
    yield from _read_json(base, data) if data.lstrip().startswith(b"{") else _read_html(base, data.decode())


class _JsonFile(msgspec.Struct):
    url: str
    hashes: dict[str, str] = {}
    size: int | None = None


class _JsonPage(msgspec.Struct):
    files: list[_JsonFile]


def _read_json(base: str, data: bytes) -> Iterator[RemoteFile]:
    for file in msgspec.json.decode(data, type=_JsonPage).files:
        yield RemoteFile(urljoin(base, file.url), file.hashes.get("sha256", ""), file.size)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (address := dict(attrs).get("href")):
            self.found.append(address)


def _read_html(base: str, text: str) -> Iterator[RemoteFile]:
    links = _Links()
    links.feed(text)
    for link in links.found:
        url, fragment = urldefrag(urljoin(base, link))
        kind, _, digest = fragment.partition("=")
        yield RemoteFile(url, digest if kind == "sha256" else "")
