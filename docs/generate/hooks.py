"""What the site's pages say of the code is made from the code while the site is built: nothing of it lies in files.

A line `<!-- made: NAME -->` of a page becomes what `MADE[NAME]` writes, {{ FILE > key > key as .2f }} the figure that
benchmarks/results/FILE holds there, `<!-- code: FILE NAME -->` that piece of the sources, or
the file. `mkdocs.yml` names this file
as a hook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import bodies
import commands
import formats
import messages
import options
import python_names
import routes
import shown
import sources

MADE: dict[str, Callable[[], str]] = {
    "engine flags": options.engine_flags,
    "server flags": options.server_flags,
    "commands": commands.every_command,
    "request fields": bodies.every_body,
    "routes": routes.every_route,
    "metrics": shown.every_metric,
    "rows": shown.row_fields,
    "row metrics": shown.row_metrics,
    "python": python_names.every_name,
    "families": formats.families,
    "formats of files": formats.of_files,
    "formats made at load": formats.made_at_load,
    "formats of gguf": formats.of_gguf,
    "formats of keys and values": formats.of_keys_and_values,
    "messages": messages.every_message,
    "architecture": lambda: sources.document("ARCHITECTURE.md", {}),
    "contributing": lambda: sources.document("CONTRIBUTING.md", {"ARCHITECTURE.md": "architecture.md"}),
    "changes": lambda: sources.document("CHANGELOG.md", {}),
    "methods of compression": formats.methods,
    "tool formats": formats.of_tools,
}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURE = re.compile(r"\{\{ (\w+\.json)((?: > [^>{}]+?)+) as (\S+) \}\}")
CODE = re.compile(r"^<!-- code: (\S+)(?: (\S+))? -->$", re.MULTILINE)
MARK = re.compile(r"^<!-- made: (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what its marks stand for."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in MADE:
            raise PluginError(f"{page.file.src_uri}: nothing is called {found[1]!r}; known: {', '.join(MADE)}")
        return MADE[found[1]]()

    def shown_code(found: re.Match[str]) -> str:
        try:
            return sources.piece(found[1], found[2] or "")
        except (OSError, LookupError) as error:
            raise PluginError(f"{page.file.src_uri}: {error}") from None

    return FIGURE.sub(figure, CODE.sub(shown_code, MARK.sub(made, markdown)))


def figure(found: re.Match[str]) -> str:
    """A number of the committed results, as `format` writes it."""
    value = results(found[1])
    for key in found[2].split(" > ")[1:]:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError):
            raise PluginError(f"benchmarks/results/{found[1]} has no {key!r} in {found[0]}") from None
    return format(value, found[3])


@lru_cache
def results(name: str) -> Any:
    """What a file of results holds."""
    path = RESULTS / name
    if not path.is_file():
        raise PluginError(f"{path} is not there")
    return json.loads(path.read_text())
