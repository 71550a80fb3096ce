"""A route of the server as one record, and the table in which every part of the server and the documents look it up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Scope

from quire.server.http.dialects import DIALECTS, OPENAI, Dialect

Handler = Callable[[Any, Request], Awaitable[Response]]
Kinds = tuple[type[msgspec.Struct], ...]
Access = Literal["public", "monitoring", "key", "admin"]

SSE = "text/event-stream"
JSON_LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, declared beside its handler in the `ROUTES` of an API's module.

    `handler` is called with the `Service` of the model that the request is for, or with the `ModelServer` where the
    route is not `per_model`. Its docstring's first line is the route's summary.
    """

    method: str
    path: str
    handler: Handler
    body: Kinds = ()
    """Structs of which the body is one; () = the route reads no body."""
    reply: Kinds = ()
    """Structs of which a good reply is one; () = it has no JSON."""
    reply_is_list: bool = False
    reply_type: Any = None
    """The type of a good reply that is no struct, beside those that are."""
    reply_may_be_list: bool = False
    group: str = ""
    """Heading in /openapi.json and /docs; "" = the name of its dialect's API."""
    text: bool = False
    """A good reply is a plain text."""
    stream: str = ""
    """The media type of its stream; "" = it has none."""
    dialect: Dialect = OPENAI
    """How it says errors."""
    access: Access = "key"
    """Who may ask: everybody; everybody unless `--protect-metrics`; a key that is valid; an administrator's key."""
    generates: bool = False
    """It is work for the engine, which a full queue refuses before the body is read."""
    operation: str | None = None
    """What traces call it, by OpenTelemetry's conventions for generative AI."""
    per_model: bool = True
    model_field: str = ""
    """A further field of the body, by its path, that names the model where `model` does not."""
    batchable: bool = False
    """Lines of a batch file may ask for it."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of parameters in the address."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Statuses of errors, with their reason, beyond those that every route of its kind has."""
    form: bool = False
    """The body is a form with files, multipart/form-data, of the fields of `body`."""
    unavailable: str = ""
    """What a 503 means that is a reply and not an error."""

    @property
    def summary(self) -> str:
        """Summary of what the route does, in one line."""
        return (self.handler.__doc__ or "").strip().splitlines()[0]

    @property
    def heading(self) -> str:
        """Group of routes that it is listed in."""
        return "Administration" if self.access == "admin" else self.group or self.dialect.api

    @property
    def shown_path(self) -> str:
        """The path as OpenAPI and the documents write it, without the kinds of its parameters."""
        return self.path.replace(":path", "")


class RouteTable:
    """All routes of a server, found by the path of a request (`route_path`)."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, tuple[Route, ...]] = {}
        for route in self.routes:
            self._exact[route.path] = (*self._exact.get(route.path, ()), route)
        self._patterns = [(compile_path(path)[0], found) for path, found in self._exact.items() if "{" in path]

    def at(self, path: str) -> tuple[Route, ...]:
        """The routes of a path, one a method; () where there are none."""
        found = self._exact.get(path)
        if found is not None:
            return found
        return next((routes for pattern, routes in self._patterns if pattern.match(path)), ())

    def dialect(self, path: str) -> Dialect:
        """How errors at a path are said, of whatever method: as its routes say them, else as the API would that all
        paths with this beginning belong to, else as OpenAI's."""
        routes = self.at(path)
        if routes:
            return routes[0].dialect
        return next((each for each in DIALECTS if each.prefix and path.startswith(each.prefix)), OPENAI)


def route_path(scope: Scope) -> str:
    """The path as routes are declared, without `--root-path`: the one name by which a route is found.

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
