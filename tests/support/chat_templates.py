"""Chat templates, honest and hostile, and the processes that render them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from text_models import PYDOC

HANG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NS = "{% set ns = namespace(s='x' * 999) %}"
LONG: dict[str, str] = {
    "a shadowed clock": "{% with _tick=dict %}" + HANG + "{% endwith %}",
    "slices": "{{ messages | slice(10**9) | list }}",
    "a sort": "{% for i in range(9999) %}{% set _ = range(99999) | sort | list %}{% endfor %}",
    "in": "{% set l = range(99999) | list %}{{ l | select('in', l | reverse | list) | list | length }}",
    "filters in loops": "{% for i in range(99999) %}{% set _ = range(99999) | map('string') | join %}{% endfor %}",
    "a power": "{% set x = 9 ** (9 ** 9) %}",
    "a power in a call": "{{ messages[0:1] + [9 ** (9 ** 9)] }}",
}
LARGE: dict[str, str] = {
    "a list of one string": "{{ ['a' * 16000000] * 1000 }}",
    "a list of lists": "{{ [[['a' * 1000] * 1000] * 1000] * 1000 }}",
    "replace": "{{ ('a' * 99999) | replace(new='b' * 99999, old='a') }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "format": "{{ ('{0}' * 5000).format('a' * 999999) }}",
    "percent": "{{ '%(a)s' * 5000 % {'a': 'a' * 999999} }}",
    "map and join": "{{ (['a' * 999999] * 9999) | map('string') | join }}",
    "~": NS + "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "tojson": "{{ (['a' * 999999] * 9999) | tojson }}",
    "indent": "{{ ('\n' * 99999) | indent(first=true, blank=true, width='a' * 99999) }}",
    "strftime_now": "{{ strftime_now('%A' * 9999999) }}" * 9,
    "a number": "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "a width": "{{ 'x' | center(10**9) }}{{ ''.ljust(10**9) }}",
    "text": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
}
BROKEN: dict[str, str] = {
    "120 nested ifs": "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "25 nested fors": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "a break outside loops": "{% break %}",
    "5,001 digits": "{{ " + "9" * 5001 + " }}",
    "5,000 brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nothing that closes": "{% for %}",
}
FAILING: dict[str, str] = {
    "a type": "{{ messages + 1 }}",
    "a call": "{{ messages() }}",
    "a filter": "{{ 5 | join }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(60) }}",
    "a division": "{{ 1 / 0 }}",
    "an argument": "{{ range() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an internal": "{{ ''.__class__.__mro__ }}",
}


def children(parent: int) -> dict[int, bytes]:
    """Process ids and command lines of what `parent` started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started_by = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(started_by) == parent:
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def renderers(parent: int) -> list[int]:
    """Process ids of the renderers that `parent` started."""
    return [pid for pid, command in children(parent).items() if b"template_worker.py" in command]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


tokenizer = Tokenizer.from_folder(PYDOC)


def make(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokenizer)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 100 }}{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}",
    "{{ [1] * 1000000000 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s.join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s | join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{:{}}'.format_map({}) }}",
    "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "{{ ['{:1000000000}'] | map('format', 1) | list }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{% for i in range(1000000000) %}{% endfor %}",
]
