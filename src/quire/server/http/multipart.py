"""Bodies of forms with files (multipart/form-data, RFC 7578), read whole within the limit of bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

from quire.core.errors import BadRequest
from quire.server.http.body import off_loop, read_bytes
from quire.server.server_options import ServerOptions

MAX_PARTS = 64
MAX_HEAD = 4096
"""Bytes of a part's headers."""
MAX_FIELD = 64 << 10
"""Bytes of a field that is no file."""
MULTIPART = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\r\n]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb'(?:^|;)\s*name="((?:[^"\\]|\\.){1,200})"', re.IGNORECASE)
_FILE = re.compile(rb"(?:^|;)\s*filename\*?=", re.IGNORECASE)


class Form(NamedTuple):
    """What a form holds: texts of fields, several where a name comes several times, and the bytes of files."""

    fields: Mapping[str, list[str]]
    files: Mapping[str, bytes]
    size: int


async def read_form(request: Request, options: ServerOptions) -> Form:
    """The form that is the body of `request`; raises as `read_struct` does."""
    found: Form | None = request.scope["state"].pop("form", None)
    if found is not None:
        return found
    data = await read_bytes(request, options.max_body_bytes, options.body_timeout, MULTIPART)
    return await off_loop(len(data), parse, data, request.headers.get("content-type", ""))


def parse(data: bytes, kind: str) -> Form:
    """The parts of `data`, a body of the content type `kind`; `BadRequest` for what is no form."""
    match = _BOUNDARY.search(kind)
    if match is None:
        raise BadRequest("content-type: multipart/form-data must name its boundary")
    mark = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    fields, files = dict[str, list[str]](), dict[str, bytes]()
    at = data.find(mark)
    for _ in range(MAX_PARTS):
        if at < 0:
            raise BadRequest("the body: the form does not end with its boundary")
        at += len(mark)
        if data.startswith(b"--", at):
            return Form(fields, files, len(data))
        end = data.find(b"\r\n" + mark, at)
        if end < 0:
            raise BadRequest("the body: the form does not end with its boundary")
        head = data.find(b"\r\n\r\n", at, min(end + 2, at + MAX_HEAD))
        if head < 0:
            raise BadRequest("the body: a part of the form has no headers, or too long ones")
        _add(data[at:head], data[head + 4 : end], fields, files)
        at = end + 2
    raise BadRequest(f"the body: the form has more than {MAX_PARTS} parts")


def _add(head: bytes, value: bytes, fields: dict[str, list[str]], files: dict[str, bytes]) -> None:
    """Add one part to what was found."""
    named = [line.split(b":", 1)[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")]
    match = _NAME.search(named[0]) if named else None
    if match is None:
        raise BadRequest("the body: a part of the form has no name")
    name = match[1].decode("utf-8", "replace").replace('\\"', '"')
    if _FILE.search(named[0]):
        if name in files:
            raise BadRequest(f"{name}: is given twice", param=name)
        files[name] = value
        return
    if len(value) > MAX_FIELD:
        raise BadRequest(f"{name}: has {len(value)} bytes; a field has at most {MAX_FIELD}", param=name)
    try:
        fields.setdefault(name, []).append(value.decode())
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: is no UTF-8", param=name) from None
