"""Tables of the commands that describe: names on the left, facts on the right."""

from __future__ import annotations

Rows = list[tuple[str, str]]


def show(title: str, rows: Rows) -> None:
    """Print one table."""
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
