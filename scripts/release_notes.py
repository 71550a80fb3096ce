"""What a release is announced with: the section of CHANGELOG.md that a tag names.

    python scripts/release_notes.py v0.2.0

Ends with exit code 1 and a line that says why where the tag is not the version of the source or has no section.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version() -> str:
    """Read the version from its one place, without importing the package."""
    source = (ROOT / "src/quire/core/version.py").read_text()
    return str(re.findall(r'^VERSION = "(.+)"$', source, re.MULTILINE)[0])


def notes(changelog: str, tag: str, source: str) -> str:
    """Cut a version's section out of a changelog; `source` is the version that the source has.

    `ValueError` where the tag is none of that version, or the section is missing or empty.
    """
    if tag != f"v{source}":
        raise ValueError(f"the tag {tag} is not v{source}, the version in src/quire/core/version.py")
    heading = re.compile(rf"^## \[?{re.escape(source)}\]?(?: [^\n]*)?$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    found = heading.search(changelog)
    if found is None or not found[1].strip():
        raise ValueError(f'CHANGELOG.md has no section "## {source}" with lines: rename "## Unreleased"')
    return found[1].strip() + "\n"


def main() -> None:
    """Print the section for the tag on the command line."""
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(), sys.argv[1], version()), end="")
    except (ValueError, IndexError) as error:
        sys.exit(f"release_notes.py: {'name a tag' if isinstance(error, IndexError) else error}")


if __name__ == "__main__":
    main()
