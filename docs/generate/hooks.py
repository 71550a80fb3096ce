"""What pages say of the code and of results is made from these, and lies in the pages, between marks nobody sees.

Behind a line `<!-- made: NAME -->` lies what `MADE[NAME]` writes, behind `<!-- code: FILE NAME -->` that piece of the
sources, or the file, each up to a line `<!-- end -->`; behind `<!-- figure: FILE > key > key as .2f -->` within a line
the figure that benchmarks/results/FILE holds there, up to `<!-- end -->`. `make docs-made` writes them anew, a test
says where they are old, and the site, of which `mkdocs.yml` names this file as a hook, is built of new ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import bodies
import commands
import dashboards
import devices
import exclusions
import families_page
import formats
import known_models
import messages
import options
import peers_of_encoders
import python_names
import real_weights_page
import routes
import shown
import smollm2
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
    "family counts": families_page.counts,
    "every family": families_page.every_family,
    "catalog": known_models.every_model,
    "smollm2 formats": smollm2.at_load,
    "smollm2 files": smollm2.same_files,
    "smollm2 written files": smollm2.written,
    "smollm2 caches": smollm2.caches,
    "smollm2 compressions": smollm2.compressions,
    "smollm2 drafts": smollm2.drafts,
    "formats of files": formats.of_files,
    "devices": devices.planned,
    "formats made at load": formats.made_at_load,
    "formats of gguf": formats.of_gguf,
    "formats of keys and values": formats.of_keys_and_values,
    "exclusions": exclusions.every_exclusion,
    "messages": messages.every_message,
    "methods of compression": formats.methods,
    "tool formats": formats.of_tools,
    "texts a second": peers_of_encoders.texts_per_second,
    "vectors over http": peers_of_encoders.over_http,
    "transcriptions": peers_of_encoders.transcriptions,
    "real vectors": real_weights_page.vectors,
    "real speech": real_weights_page.speech,
    "real silence": real_weights_page.silence,
}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WHOLE: dict[str, Callable[[], str]] = {
    "architecture": lambda: sources.document(
        "ARCHITECTURE.md", {"docs/design/": "../design/", "docs/extend/": "", "docs/glossary.md": "../glossary.md"}
    ),
    "contributing": lambda: sources.document(
        "CONTRIBUTING.md", {"ARCHITECTURE.md": "architecture.md", "docs/extend/": ""}
    ),
    "changes": lambda: sources.document("CHANGELOG.md", {}),
}
"""Documents beside README.md, which the site has as pages: a page in docs/ leads to them."""
END = "<!-- end -->"
FIGURE = re.compile(rf"<!-- figure: (\w+\.json)((?: > [^>{{}}]+?)+) as (\S+) -->(?:(?:(?!<!--).)*{END})?")
BLOCK = re.compile(rf"^<!-- (made|code|whole): (\S.*?) -->\n?(?:(?:(?!^<!-- (?:made|code|whole): ).)*?^{END}$)?",
                   re.MULTILINE | re.DOTALL)  # fmt: skip
MARKS = re.compile(rf"^(?:<!-- (?:made|code|whole|needs): .+ -->|{END})\n|<!-- figure: [^\n]+? -->|{END}", re.MULTILINE)
"""Marks, without what lies between. "needs" says why tests do not run a code block (tests/project/test_docs_run.py)."""


DASHBOARD = "measure/techniques-dashboard.html"


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the dashboard of the committed rows, which is a page of the site alone."""
    files.append(File.generated(config, DASHBOARD, content=dashboards.techniques()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what its marks stand for, and without them."""
    return MARKS.sub("", written(markdown, page.file.src_uri, site=True) + "\n")


def written(markdown: str, where: str, site: bool = False) -> str:
    """The page `where` with what its marks stand for behind each; `site`: with whole documents, too."""

    def made(found: re.Match[str]) -> str:
        kind, name = found[1], found[2]
        if kind == "whole" and not site and found[0].endswith(END):
            return found[0]
        return f"<!-- {kind}: {name} -->\n{_made(kind, name, where).strip()}\n\n{END}"

    return FIGURE.sub(_figure, BLOCK.sub(made, markdown))


def _made(kind: str, name: str, where: str) -> str:
    if kind == "code":
        path, _, piece = name.partition(" ")
        try:
            return sources.piece(path, piece)
        except (OSError, LookupError) as error:
            raise PluginError(f"{where}: {error}") from None
    known = WHOLE if kind == "whole" else MADE
    if name not in known:
        raise PluginError(f"{where}: nothing is called {name!r}; known: {', '.join(known)}")
    return known[name]()


def _figure(found: re.Match[str]) -> str:
    mark = found[0].partition("-->")[0]
    return f"{mark}-->{figure(found)}{END}"


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
