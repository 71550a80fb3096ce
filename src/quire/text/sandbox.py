"""A jinja2 environment in which a template can spend a bounded amount of time and memory and reach nothing else.

jinja's sandbox keeps templates from Python's internals but not from running forever or building a string of gigabytes.
Here every turn of a loop and every call of a macro checks a deadline, and every operation that can grow a value checks
its size first.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 0.25
"""CPU time of the calling thread that one rendering may take."""
MAX_SIZE = 16 * 2**20
"""Longest string or list a template may build, in characters or items."""

_WIDTHS = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "wordwrap", "zfill"})
"""String methods and filters whose result has any size an argument names; no template needs them."""
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""A width of five digits, or one given as an argument."""

_deadline: ContextVar[float] = ContextVar("deadline")


class LimitExceeded(TemplateError):
    """The template ran too long or wrote too much."""


def _tick() -> str:
    if time.thread_time() > _deadline.get():
        raise LimitExceeded(f"rendering takes more than {SECONDS} s")
    return ""


def _limit(size: float) -> None:
    if size > MAX_SIZE:
        raise LimitExceeded(f"a value grows beyond {MAX_SIZE} characters or items")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, bytes)) else 0


def _concat(*values: Any) -> str:
    parts = [str(v) for v in values]
    _limit(sum(map(len, parts)))
    return "".join(parts)


def _check_growth(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Before method or filter `name` runs on `value`: refuse what multiplies sizes beyond the limit."""
    if name == "replace" and len(args) >= 2:
        text, old, new = str(value), str(args[0]), str(args[1])
        _limit(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join":
        separator, items = (value, args[0]) if isinstance(value, str) and args else (args[0] if args else "", value)
        if isinstance(items, (str, list, tuple)):
            _limit(len(items) * len(str(separator)) + sum(_length(i) for i in items))
    elif name == "indent":
        width = args[0] if args else 4
        _limit(_length(value) + (str(value).count("\n") + 1) * (width if isinstance(width, int) else _length(width)))
    elif name == "format" and isinstance(value, str) and _WIDE_FORMAT.search(value):
        raise LimitExceeded("a format with such a width")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function` with its value checked before and its result after."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _check_growth(name, args[first], (*args[first + 1 :], *kwargs.values()))
        result = function(*args, **kwargs)
        _limit(_length(result))
        return result

    return filtered


class _Bound(NodeTransformer):
    """Puts a `_tick()` at the start of every loop and macro body, and replaces `a ~ b` by a call that checks sizes."""

    def _ticked(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _ticked

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name("_concat", "load"), node.nodes, [], None, None).set_lineno(node.lineno)


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
    if isinstance(indent, int) and indent > 64:
        raise LimitExceeded(f"an indent of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the filters and globals that transformers gives them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {n: _checked(n, f) for n, f in self.filters.items() if n not in _WIDTHS}
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
            dict=_make_dict,
            _tick=_tick,
            _concat=_concat,
        )
        del self.globals["lipsum"]

    def bounded(self, source: str) -> jinja2.Template:
        """Compile `source` with the checks built in."""
        tree = _Bound().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's rule, and no method that makes strings of any width."""
        return not (isinstance(obj, str) and attr in _WIDTHS) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called where a template takes `format` or `format_map` of a string."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_growth("format", value.__self__, ())
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would grow beyond the limit before it does."""
        if operator == "+":
            _limit(_length(left) + _length(right))
        elif operator == "*":
            _limit(_length(left) * right if isinstance(right, int) else 0)
            _limit(_length(right) * left if isinstance(left, int) else 0)
        elif operator == "**":
            _limit(float("inf") if isinstance(right, int) and abs(right) > 64 else 0)
        else:
            _check_growth("format", left, ())
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 4096:
            raise LimitExceeded("a number grows beyond 4096 bits")
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls that a template makes, checked before and after."""
        value = getattr(__obj, "__self__", None)
        if isinstance(value, str):
            _check_growth(__obj.__name__, value, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        _limit(_length(result))
        return result

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
        """The text of `template`; `LimitExceeded` after SECONDS or `max_chars`."""
        token = _deadline.set(time.thread_time() + SECONDS)
        try:
            return _collect(template.generate(**variables), max_chars)
        finally:
            _deadline.reset(token)


def _collect(chunks: Iterable[str], max_chars: int) -> str:
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > max_chars:
            raise LimitExceeded(f"the text grows beyond {max_chars} characters")
        _tick()
    return "".join(parts)
