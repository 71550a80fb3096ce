"""What the source of the installed transformers says of a model type, read as text: nothing of it is imported.

Headers are described so in a fraction of a second; importing the package takes several. What cannot be seen here (a
default that code computes) is found when the model is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@dataclass(frozen=True)
class SourceFacts:
    """`defaults`: fields of the configuration with a plain default. `names`: field -> the configuration's own name.

    `stateful`: the class says that its state is more than keys and values. `interface`: attention goes through
    transformers' attention interface.
    """

    defaults: Mapping[str, Any]
    names: Mapping[str, str]
    stateful: bool
    interface: bool


class Fields:
    """A config.json under the usual names of fields, with the defaults of its configuration class as attributes."""

    def __init__(self, raw: Mapping[str, Any], facts: SourceFacts) -> None:
        self._raw, self._facts = raw, facts

    def __getattr__(self, name: str) -> Any:
        own = self._facts.names.get(name, name)
        for known in (own, name):
            if self._raw.get(known) is not None:
                return self._raw[known]
        return self._facts.defaults.get(own)


def package() -> Path | None:
    """The folder of the installed transformers; None when it is not installed."""
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def causal_classes(root: Path) -> dict[str, str]:
    """Model type -> class of the causal language models in `root`."""
    for node in ast.parse(_text(root / "models" / "auto" / "modeling_auto.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == CAUSAL:
            call = node.value
            pairs = call.args[0] if isinstance(call, ast.Call) and call.args else ast.List([])
            return {k: v for k, v in ast.literal_eval(pairs) if isinstance(v, str)}
    return {}


def source_facts(root: Path, model_type: str) -> SourceFacts | None:
    """The facts of a model type; None where its files are not laid out as usual."""
    code = causal_classes(root).get(model_type)
    kind = re.compile(rf"model_type\s*=\s*[\"']{re.escape(model_type)}[\"']")
    own = root / "models" / model_type.replace("-", "_")
    folders = [own] if own.is_dir() else sorted((root / "models").iterdir())  # those of a type within another's
    config = next(
        ((f, text) for f in folders for text in map(_text, f.glob("configuration_*.py")) if kind.search(text)), None
    )
    if code is None or config is None:
        return None
    folder, said = config
    modeling = [text for text in map(_text, sorted(folder.glob("modeling_*.py"))) if f"class {code}(" in text]
    if not modeling:
        return None
    found = next((c for c in _classes(said) if kind.search(ast.unparse(c))), None)
    if found is None:
        return None
    fields = dict(filter(None, map(_field, found.body)))
    names = fields.get("attribute_map")
    return SourceFacts(
        fields,
        names if isinstance(names, dict) else {},
        _true("_is_stateful", modeling[0]),
        _true("_supports_attention_backend", modeling[0]),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _classes(text: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


def _field(node: ast.stmt) -> tuple[str, Any] | None:
    """The name and value of a field whose default is written out."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = getattr(node, "value", None)
    if not isinstance(target, ast.Name) or not isinstance(value, ast.expr):
        return None
    try:
        return target.id, ast.literal_eval(value)
    except ValueError:
        return None


def _true(name: str, text: str) -> bool:
    return re.search(rf"^\s+{name}\s*=\s*True", text, re.MULTILINE) is not None
