"""What the site's pages say of the code is made from the code while the site is built: nothing of it is kept in files.

A line `<!-- made: NAME -->` of a page becomes what `MADE[NAME]` writes; `mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import bodies
import commands
import formats
import options
import python_names
import routes
import shown
from mkdocs.exceptions import PluginError

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
    "methods of compression": formats.methods,
    "tool formats": formats.of_tools,
}
MARK = re.compile(r"^<!-- made: (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what its marks stand for."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in MADE:
            raise PluginError(f"{page.file.src_uri}: nothing is called {found[1]!r}; known: {', '.join(MADE)}")
        return MADE[found[1]]()

    return MARK.sub(made, markdown)
