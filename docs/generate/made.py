"""Write what the pages of docs/ have of the code and of results anew: `make docs-made`; it prints those that change."""

from __future__ import annotations

from pathlib import Path

from hooks import written

DOCS = Path(__file__).parents[1]


def main() -> None:
    """Write the pages that are old."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = written(text, str(page.relative_to(DOCS)))
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
