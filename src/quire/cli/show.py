"""Tables of the commands: facts by name, what changed beside what was, and the commands to type next."""

from __future__ import annotations

from collections.abc import Sequence

Rows = list[tuple[str, str]]


def show(title: str, rows: Rows) -> None:
    """Print one table."""
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def show_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a line of headings: the first column is set to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        first, *rest = (
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join((first, *rest)).rstrip())


def show_next(*commands: tuple[str, str]) -> None:
    """Print what to type next: commands, and what each is for."""
    print("next:")
    width = max(len(command) for command, _ in commands)
    for command, purpose in commands:
        print(f"  {command:<{width}}  # {purpose}")


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
