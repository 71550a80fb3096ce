"""Pages of the documentation, and what people wrote of them."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
"""What `make` makes."""


def written(path: Path) -> str:
    """What people wrote of a page: what is made of the code is looked at where it is made."""
    return re.sub(r"(<!-- (?:made|code|whole)\b[^\n]*? -->).*?<!-- end -->", r"\1", path.read_text(), flags=re.DOTALL)
