"""The oldest versions that pyproject.toml lets in, as constraints for pip.

    python scripts/oldest_dependencies.py [EXTRA...]

One line for each library of quire itself and of the extras that are named: `name==lowest`, with its marker. What these
libraries need in turn, and extras that are not named, pip is free to choose.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<lowest>[\w.]+)[^;]*(?P<marker>;.*)?")


def constraint(requirement: str) -> str:
    """Return the constraint to the lowest version of a requirement; ValueError where it has no lower bound."""
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        raise ValueError(f"pyproject.toml: {requirement!r} has no lower bound; write it as 'name>=version'")
    return f"{found['name']}=={found['lowest']}{found['marker'] or ''}"


def constraints(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the constraints of a project's own libraries and of some extras; ValueError for an extra it lacks."""
    optional = project["optional-dependencies"]
    if unknown := sorted(set(extras) - set(optional)):
        raise ValueError(f"pyproject.toml has no extra {unknown[0]!r}; it has {', '.join(sorted(optional))}")
    asked = [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]
    return sorted({constraint(requirement) for requirement in asked})


def main() -> int:
    """Print the constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        print("\n".join(constraints(project, sys.argv[1:])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
