"""Files and pieces of the sources as the pages show them: a function, a class, the row of a table by its key."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".service": "ini", "": "dockerfile"}
"""By the suffix of a file."""


def piece(path: str, name: str) -> str:
    """The source of what `name` is in the file, as code; a name in quotes is a key of a dict; none: the whole file.

    `LookupError` where there is no such thing.
    """
    text = (ROOT / path).read_text()
    if not name:
        return f'```{LANGUAGES[Path(path).suffix]} title="{path}"\n{text}```\n'
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        span = _span(node, name)
        if span is not None:
            found = textwrap.dedent("\n".join(lines[span[0] - 1 : span[1]])).rstrip(",")
            return f'```python title="{path}"\n{found}\n```\n'
    raise LookupError(f"{path} has no {name}")


def document(name: str, moved: dict[str, str]) -> str:
    """A document that lies beside README.md, its links to what is a page here led to that.

    `moved`: link, or how links begin -> the same of pages.
    """
    text = (ROOT / name).read_text()
    for link, page in moved.items():
        text = text.replace(f"]({link}", f"]({page}")
    return text


def _span(node: ast.AST, name: str) -> tuple[int, int] | None:
    """First and last line of what is called so, decorators with it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return first, node.end_lineno or node.lineno
    if isinstance(node, ast.Dict) and name[:1] == '"':
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name.strip('"'):
                return key.lineno, value.end_lineno or key.lineno
    return None
