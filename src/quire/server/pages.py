"""The pages at `/`, `/dashboard` and `/docs`: files of the package, read once."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as PageRoute

import quire

FOLDER = Path(__file__).parent / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Text of models is shown by text nodes alone; `require-trusted-types-for` has the browser refuse all else.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # modules of two versions must not meet
}


def pages() -> list[PageRoute]:
    """A route for each file: index.html is `/`, the others lie under `/playground/` as they do here.

    Links in them are relative, so that they hold under any path a proxy shows the server at.
    """
    files = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in KINDS)
    names = {path: path.relative_to(FOLDER).as_posix() for path in files}
    return [page_route(path, "/" if name == "index.html" else f"/playground/{name}") for path, name in names.items()]


def page_route(path: Path, where: str) -> PageRoute:
    """A file of the package at `where`."""
    body, kind = path.read_bytes(), KINDS[path.suffix]

    async def page(_: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return PageRoute(where, page, methods=["GET"], include_in_schema=False)


LIVE = FOLDER.parent / "live"
REFERENCE = FOLDER.parent / "reference"
SHARED = tuple(FOLDER / name for name in ("api.js", "dom.js", "metrics.js", "icon.svg"))
UPLOT = Path(quire.__file__).parent / "dashboard" / "web" / "uplot"


def live_pages() -> list[PageRoute]:
    """`/dashboard`, and a route below it for each file of the page: those that it shares with the playground, too."""
    files = [path for folder in (LIVE, UPLOT) for path in sorted(folder.iterdir()) if path.suffix in KINDS]
    return [
        page_route(path, "/dashboard" if path.name == "index.html" else f"/dashboard/{path.name}")
        for path in (*files, *SHARED)
    ]


def reference_pages() -> list[PageRoute]:
    """`/docs`, which shows /openapi.json and tries what it describes, and a route below it for each of its files."""
    shared = (FOLDER / name for name in ("api.js", "dom.js", "icon.svg"))
    return [
        page_route(path, "/docs" if path.name == "index.html" else f"/docs/{path.name}")
        for path in (*sorted(REFERENCE.iterdir()), *shared)
    ]
