"""First screens of the commands in a terminal, as pictures: `python tests/support/terminal_pictures.py FOLDER`.

Needs smollm2 (`quire pull smollm2`).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from terminal import Terminal

COLUMNS = 100
SCREENS = {
    "run": (["run", "smollm2"], "\n> "),
    "serve": (["serve", "smollm2"], "are finished"),
    "help": (["--help"], "Show the help of a command."),
    "list": (["list"], "MB"),
}
"""Picture -> the command, and the end of its first screen."""


def screen(words: list[str], end: str) -> str:
    """All that the command writes to a terminal until it waits, with its colours."""
    with Terminal(["-m", "quire", *words], {"COLUMNS": str(COLUMNS)}) as terminal:
        terminal.wait(end, 60)
        return "\n".join(line.rpartition("\r")[2] for line in terminal.seen.replace("\r\n", "\n").split("\n"))


def main(folder: Path) -> None:
    """Write a picture of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (words, end) in SCREENS.items():
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(Text.from_ansi(f"$ quire {' '.join(words)}\n{screen(words, end)}"))
        console.save_svg(str(folder / f"{name}.svg"), title=f"quire {' '.join(words)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
