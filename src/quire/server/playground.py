"""The page at `/`: files of the package, read once; nothing in them depends on who asks."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def pages() -> list[Route]:
    """A route for each file: index.html is `/`, the others lie under `/playground/`.

    Links in them are relative, so that they hold under any path a proxy shows the server at.
    """
    files = (path for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS)
    return [page_route(path, "/" if path.name == "index.html" else f"/playground/{path.name}") for path in files]


def page_route(path: Path, where: str) -> Route:
    """A file of the package at `where`."""
    body, kind = path.read_bytes(), KINDS[path.suffix]

    async def page(_: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return Route(where, page, methods=["GET"], include_in_schema=False)
