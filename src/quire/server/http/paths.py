"""The path of a route in what a client asked for, below whatever path a proxy shows the server at (`--root-path`)."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path as routes are registered, without `--root-path`: the one name by which anything about a route is kept.

    uvicorn puts the root path before the path, as ASGI says.
    """
    return _below(scope["path"], scope.get("root_path", ""))


def with_one_root(scope: Scope) -> Scope:
    """The scope of a request as a proxy would have sent it that takes the root path away.

    Where one does not, or where clients come past it, the root path is there twice: theirs and uvicorn's.
    """
    root = scope.get("root_path", "")
    path = route_path(scope)
    if not root or _below(path, root) == path:
        return scope
    raw: bytes | None = scope.get("raw_path")
    return {**scope, "path": path, "raw_path": None if raw is None else raw.removeprefix(root.encode())}


def _below(path: str, root: str) -> str:
    if not root or not (path == root or path.startswith(f"{root}/")):
        return path
    return path[len(root) :] or "/"
