"""Write the generated parts of the pages and the charts anew (`make docs-made`), and print the files that changed."""

from __future__ import annotations

from pathlib import Path

import charts
from hooks import written

DOCS = Path(__file__).parents[1]


def main() -> None:
    """Write the pages and charts that are old."""
    for path in charts.write():
        print(path.relative_to(DOCS.parent))
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = written(text, str(page.relative_to(DOCS)))
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
