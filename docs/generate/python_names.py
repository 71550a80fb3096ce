"""The Python names: signatures and docstrings of what `import quire` and `quire.search` offer."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.core.options.ranges import ranges_of
from quire.server.apis.openai.protocol import CompletionRequest
from quire.server.openapi import help_of
from words import cell, escaped, ranged, table

MODULES: dict[str, tuple[str, ...]] = {
    "quire": ("LLM", "SamplingParams", "StructuredOutputsParams", "LoRARequest", "RequestOutput", "CompletionOutput"),
    "quire.search": (),
}
"""In the order of the page; the rest of a module's public names behind them."""


def every_name() -> str:
    """A section for each public name."""
    parts = []
    for module, first in MODULES.items():
        found = importlib.import_module(module)
        names = dict.fromkeys((*first, *found.__all__))
        parts += [section(module, name, getattr(found, name)) for name in names if name != "__version__"]
    return "\n".join(parts)


def section(module: str, name: str, found: Any) -> str:
    """A class with its fields and methods, or a function."""
    text = f"## {module}.{name}\n\n"
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return f"{text}`{spelled(found)}`: a type.\n"
    if not inspect.isclass(found):
        return f"{text}{signed(name, found)}\n{told(found)}\n"
    fields = fields_of(found)
    if not fields and "__init__" in vars(found) and not issubclass(found, Exception):
        text += signed(name, found.__init__) + "\n"
    text += f"{told(found)}\n"
    text += f"\n{table(('field', 'type', 'default', 'meaning'), fields)}" if fields else ""
    for method, value in methods_of(found):
        text += f"\n### {name}.{method}\n\n"
        text += f"{told(value)}\n" if isinstance(value, property) else f"{signed(method, value)}\n{told(value)}\n"
    return text


def signed(name: str, found: Any) -> str:
    """A call of it as code, a parameter a line where there are many."""
    signature = inspect.signature(found)
    params = [re.sub(r": '([^']*)'", r": \1", str(p)) for p in signature.parameters.values() if p.name != "self"]
    at = next((i for i, p in enumerate(signature.parameters.values()) if p.kind is p.KEYWORD_ONLY), None)
    if at is not None and not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        params.insert(at - ("self" in signature.parameters), "*")
    returns = (
        ""
        if signature.return_annotation in (inspect.Signature.empty, None, "None")
        else f" -> {signature.return_annotation}"
    )
    line = f"{name}({', '.join(params)}){returns}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {p},\n" for p in params) + f"){returns}"
    return f"```python\n{line}\n```\n"


def told(found: Any) -> str:
    """Its docstring."""
    return escaped(inspect.cleandoc(found.__doc__ or ""))


def fields_of(found: type) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of a struct or dataclass; none of another class."""
    if issubclass(found, msgspec.Struct):
        fields: Any = msgspec.structs.fields(found)
        missing: Any = msgspec.NODEFAULT
    elif dataclasses.is_dataclass(found):
        fields, missing = dataclasses.fields(found), dataclasses.MISSING
    else:
        return []
    meanings = help_of(CompletionRequest) | OWN if found.__name__ == "SamplingParams" else {}
    ranges, plain = ranges_of(found), get_type_hints(found)
    rows = []
    for field in fields:
        kind = plain[field.name] if issubclass(found, msgspec.Struct) or field.name in ranges else field.type
        meaning = f"{meanings.get(field.name, '')} {ranged(ranges.get(field.name))}".strip()
        rows.append((f"`{field.name}`", f"`{spelled(kind)}`", default(field, missing), meaning))
    return rows


def default(field: Any, missing: Any) -> str:
    """What it is where it is not given."""
    if field.default is missing:
        return "required" if field.default_factory is missing else f"`{field.default_factory()!r}`"
    return f"`{field.default!r}`"


OWN = {
    "detokenize": "Whether tokens become text; without, stop strings are not looked for.",
    "logprobs": "Log-probabilities of each token and of so many likeliest ones.",
    "max_tokens": "Tokens to write at most; None = until the context is full.",
    "temperature": "Logits are divided by it; 0 = always the likeliest token.",
}
"""What of `SamplingParams` means something else than in a body, or is not there."""


def spelled(kind: Any) -> str:
    """A type as code."""
    if get_origin(kind) is Union:
        return " | ".join("None" if part is type(None) else spelled(part) for part in get_args(kind))
    text = (
        kind
        if isinstance(kind, str)
        else kind.__name__
        if isinstance(kind, type) and not hasattr(kind, "__args__")
        else str(kind)
    )
    return cell(re.sub(r"\b(?:quire|typing|collections)\.(?:\w+\.)*", "", text))


def methods_of(found: type) -> list[tuple[str, Any]]:
    """Public methods and properties that are documented, in the order of the source, bases' last."""
    seen: dict[str, Any] = {}
    for base in found.__mro__:
        if base.__module__.startswith("quire"):
            for name, value in vars(base).items():
                documented = inspect.isfunction(value) or isinstance(value, (property, classmethod))
                if name[0] != "_" and documented and value.__doc__:
                    seen.setdefault(name, value.__func__ if isinstance(value, classmethod) else value)
    return list(seen.items())
