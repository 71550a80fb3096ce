"""Inputs that mean to take all time or memory: templates of chats, and schemas, patterns and grammars of answers."""

from __future__ import annotations

import random
from typing import Any

ATOMS = ("0", "9", "99999", "10**9", "-1", "1.5", "'x'", "'ab' * 9999", "'%s'", "'{0}' * 999", "messages", "[1]", "{}",
         "none", "undefined_name", "range(99999)", "['a' * 9999] * 9999", "messages[0].role", "dict(a=1)")  # fmt: skip
OPERATORS = ("+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or")
FILTERS = ("list", "join", "join('x' * 9999)", "sort", "unique", "reverse", "length", "tojson", "tojson(indent=9999)",
           "string", "upper", "trim", "center(10**8)", "indent(99999)", "replace('a', 'b' * 99999)", "batch(10**8, 0)",
           "slice(10**8)", "map('string')", "select('in', 'ab')", "sum", "sum(start=[])", "first", "last", "int",
           "float", "abs", "round(10**6)", "wordwrap(1)", "pprint", "urlize", "xmlattr", "dictsort", "items",
           "groupby(0)", "format(1, 2)", "attr('format')", "default('x')", "map('length')", "min")  # fmt: skip
METHODS = ("format('a' * 99999)", "replace('', 'y' * 999)", "join(['x'] * 99999)", "ljust(10**8)", "zfill(10**8)",
           "encode()", "split('')", "expandtabs(10**8)", "format_map({})", "update({})", "append(1)", "items()",
           "get('a')", "count('')", "translate({97: 'b' * 9999})", "strip()", "__class__", "mro()")  # fmt: skip
"""Of values in templates."""


def expression(rng: random.Random, depth: int) -> str:
    """One of jinja's, up to `depth` deep."""
    if depth == 0:
        return rng.choice(ATOMS)
    inner = f"({expression(rng, depth - 1)})"
    kind = rng.randrange(6)
    if kind < 2:
        return f"{inner} | {rng.choice(FILTERS)}"
    if kind == 2:
        return f"{inner}.{rng.choice(METHODS)}"
    if kind == 3:
        return f"{inner} {rng.choice(OPERATORS)} ({expression(rng, depth - 1)})"
    if kind == 4:
        return f"[{inner}] * {rng.choice(('3', '99', '99999', '10**8'))}"
    return f"{inner} if {expression(rng, depth - 1)} else {rng.choice(ATOMS)}"


def template(rng: random.Random, depth: int = 3) -> str:
    """A template of random statements: most do not end, do not fit, or fail."""
    inner = template(rng, depth - 1) if depth else "{{ " + expression(rng, rng.randrange(4)) + " }}"
    found = expression(rng, rng.randrange(3))
    return rng.choice((
        "{% for a in " + found + " %}" + inner + "{% endfor %}",
        "{% for a in range(99999) %}" + inner + "{% endfor %}",
        "{% if " + found + " %}" + inner + "{% else %}" + inner + "{% endif %}",
        "{% set x = " + found + " %}" + inner,
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}" + inner,
        "{% macro m(n) %}" + inner + "{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}" + inner + "{% endcall %}",
        "{% filter " + rng.choice(FILTERS) + " %}" + inner + "{% endfilter %}",
        "{% with range = dict, x = " + found + " %}" + inner + "{% endwith %}",
        "{% generation %}" + inner + "{% endgeneration %}",
        inner * rng.choice((1, 2, 40)),
        inner[: rng.randrange(1 + len(inner))],
    ))  # fmt: skip


def nested(schema: Any, depth: int, key: str = "items") -> Any:
    """`schema` within `depth` others."""
    for _ in range(depth):
        schema = {"type": "array", key: schema}
    return schema


SCHEMAS: list[Any] = [
    nested({"type": "string"}, 60),
    nested({"type": "string"}, 400),
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"type": "array", "minItems": 10**9, "maxItems": 10**9},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "a{1000}{1000}{1000}"},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    {"enum": [str(i) * 20 for i in range(20_000)]},
    {"anyOf": [{"const": i} for i in range(20_000)]},
    {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(30)]} for i in range(60)]},
    {"type": "object", "properties": {f"k{i}": {"type": "object"} for i in range(5000)}, "required": ["k0"]},
    {"type": "object", "patternProperties": {"^(x+x+)+y$": {"$ref": "#"}}, "additionalProperties": {"$ref": "#"}},
    {"not": {"not": {"not": {}}}},
    {"type": ["string", 5, None]},
    {"oneOf": []},
    "not a schema",
    [],
    True,
]
PATTERNS = ["(a+)+$", "(a|a)*b", "(x+x+)+y", "a{1000}{1000}", "a{0,99999}" * 20, "(" * 5000, "(" * 99 + ")" * 99,
            "[" * 3000, "(?=a)", "(a)\\1", "\\p{L}{500}", ".*" * 2000, "(.*)*" * 50, "a" * 200_000, "[^\\w]{9,99999}",
            "(?:" * 400 + "a" + ")*" * 400, "\\", "*", "a**", "(?P<n>a)(?P<n>b)", "\x00", "(?i:a)",
            "|" * 50_000]  # fmt: skip
GRAMMARS = ["root ::= root", "root ::= root root | \"\"", 'root ::= "a" root "b" | root', "start: start", "root ::=",
            "root ::= " + '"a" | ' * 20_000 + '"b"', "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(200)),
            "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "root ::= [a-z]{1,999999999}", "nonsense"]  # fmt: skip


def constrained() -> list[dict[str, Any]]:
    """Fields of requests that ask for answers of a shape, each by every name there is for it."""
    found: list[dict[str, Any]] = [{"response_format": {"type": kind}} for kind in ("json_object", "regex", "", 5)]
    for schema in SCHEMAS:
        found += [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            {"guided_json": schema},
            {"structured_outputs": {"json": schema}},
        ]
    found += [f for p in PATTERNS for f in ({"guided_regex": p}, {"structured_outputs": {"regex": p}})]
    found += [f for g in GRAMMARS for f in ({"guided_grammar": g}, {"structured_outputs": {"grammar": g}})]
    return [*found, {"guided_choice": ["x" * 99] * 50_000}, {"structured_outputs": {"choice": []}}]


def schema(rng: random.Random, depth: int = 4) -> Any:
    """A random schema, with bounds and references that no program likes."""
    if depth == 0:
        return rng.choice(SCHEMAS[2:])
    inner = schema(rng, depth - 1)
    number = rng.choice((0, -1, 3, 10**9, 10**30, 1.5))
    return rng.choice((
        nested(inner, rng.choice((1, 3, 40)), rng.choice(("items", "contains", "prefixItems", "not"))),
        {"type": "object", "properties": {"a": inner, "b": {"$ref": "#/properties/a"}}, "minProperties": number},
        {rng.choice(("anyOf", "oneOf", "allOf")): [inner] * rng.choice((1, 2, 9))},
        {"type": "array", "items": inner, "minItems": number, "uniqueItems": True},
        {"if": inner, "then": {"$ref": "#"}, "else": inner},
        {"type": "string", "pattern": pattern(rng), "maxLength": number},
    ))  # fmt: skip


def pattern(rng: random.Random, depth: int = 5) -> str:
    """A random regular expression, nested and repeated."""
    if depth == 0:
        return rng.choice([*PATTERNS[:4], "a", ".", "[a-z]", "\\d", "", "\\u0000", "é"])
    one, two = pattern(rng, depth - 1), pattern(rng, rng.randrange(depth))
    repeat = rng.choice(("*", "+", "?", "{3}", "{0,999}", "{999,}", "*?", ""))
    return rng.choice((f"({one}){repeat}", f"(?:{one}|{two}){repeat}", one + two, f"^{one}$", f"({one}"))
