"""The process that renders chat templates, which come with models and are trusted with nothing.

jinja's sandbox keeps a template from Python's internals, and the kernel bounds the rest: CPU time (a timer whose signal
ends the process), address space, files, processes. So nothing here lists what a template might do to take long or grow.
`quire.text.template_renderer` starts this file as a program of its own, with jinja2 and the standard library alone:
`template_worker.py FOLDERS MEMORY SHARE FRAME` (where jinja2 is; bytes beyond those of the process at rest, and beside
them for each byte of a frame; the longest frame).

Frames on file descriptor 0, a socket, are JSON in UTF-8 behind its length, those to this process also behind seconds of
CPU time. The first one says that it is ready. The end of the socket ends the process.
macOS enforces no bound of address space: there memory is bounded only by what fits in the CPU time.
"""

from __future__ import annotations

import json
import os
import pprint  # noqa: F401 (a filter imports it when used, when no file can be opened any more)
import resource
import signal
import struct
import sys
import textwrap  # noqa: F401
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.debug
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

PER_BYTE = 4
"""Characters that a text may have beside its bound for each byte of the frame."""
HEAD = struct.Struct("!Id")
MESSAGE = 300
"""Characters of an error that are told."""
_WARM = "{% set a = 'b' %}{% for m in [1] %}{{ m | tojson }}{{ a ~ m }}{% endfor %}"
"""Loads what the first template would: no file can be opened later."""


class _TooLong(Exception):
    """The text outgrew its bound."""


class _Generation(Extension):
    """`{% generation %}`, with which training code marks what the assistant said; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the filters and globals that transformers gives them."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_make_dict
        )
        del self.globals["lipsum"]


def _collect(chunks: Iterable[str], max_chars: int) -> str:
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > max_chars:
            raise _TooLong(f"the text grows beyond {max_chars} characters")
    return "".join(parts)


class _Jobs:
    """Compiles and renders one after another; templates stay compiled under their keys."""

    def __init__(self) -> None:
        self._sandbox = Sandbox()
        self._templates: dict[str, jinja2.Template] = {}

    def do(self, job: dict[str, Any], seconds: float) -> dict[str, str]:
        """{"text"} or {"error", "kind"}; the process ends by SIGPROF after `seconds` of CPU time."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return {"text": self._run(job)}
        except MemoryError:
            return {"kind": "memory", "error": ""}
        except _TooLong as error:
            return {"kind": "limit", "error": str(error)}
        except jinja2.UndefinedError as error:
            return _told("undefined", error)
        except SecurityError as error:
            return _told("security", error)
        except TemplateError as error:
            return _told("refused", error)
        except SyntaxError as error:
            return {"kind": "failed", "error": str(error.msg)[:MESSAGE]}
        except Exception as error:
            return _told("failed", error, f"{type(error).__name__}: ")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _run(self, job: dict[str, Any]) -> str:
        """Compile "source" under "key", or render "key" with "values" to at most "max_chars"."""
        if "source" in job:
            self._templates[job["key"]] = self._sandbox.from_string(job["source"])
            return ""
        return _collect(self._templates[job["key"]].generate(job["values"]), job["max_chars"])


def _told(kind: str, error: Exception, prefix: str = "") -> dict[str, str]:
    return {"kind": kind, "error": f"{prefix}{error}"[:MESSAGE]}


def _address_space() -> int | None:
    """Bytes of address space in use, or None where the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _limit(what: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(what, (soft, hard))
    except (ValueError, OSError):  # macOS has some limits by name only
        return


def _read(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(size - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _write(data: bytes) -> None:
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(0, rest) :]


def main() -> None:
    """Answer jobs until the socket ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    memory, share, frame = map(int, sys.argv[3:])
    jobs = _Jobs()
    jobs.do({"key": "", "source": _WARM}, 10)
    jobs.do({"key": "", "values": {}, "max_chars": 9}, 10)
    base = _address_space()
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        _limit(getattr(resource, name), 0, 0)
    _write(b"{}")
    while True:
        size, seconds = HEAD.unpack(_read(HEAD.size))
        if base is not None:
            _limit(resource.RLIMIT_AS, base + memory + share * size, base + memory + share * frame)
        job = json.loads(_read(size).decode("utf-8", "surrogatepass"))
        reply = jobs.do(job | {"max_chars": job.get("max_chars", 0) + PER_BYTE * size}, seconds)
        text = reply.pop("text", None)  # follows as it is
        line = json.dumps(reply, ensure_ascii=False)
        _write((line if text is None else f"{line}\n{text}").encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()
