"""Markdown on a terminal while it is written: each line is drawn anew as it grows, and only rows that differ."""

from __future__ import annotations

import io
import re
from typing import TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

TABS = 4
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would move the cursor or command the terminal."""
FENCE = re.compile(r"\s*(```+|~~~+)\s*([\w+#.-]*)\s*$")
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
ITEM = re.compile(r"(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$")
QUOTE = re.compile(r"\s*>\s?(.*)$")
RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*$")
ROW = re.compile(r"\s*\|.*\|\s*$")
DIVIDER = re.compile(r"\s*\|[\s:|-]+\|\s*$")
MARKS = re.compile(
    r"(?P<code>`+)(?P<in_code>.+?)(?P=code)(?!`)"
    r"|\*\*(?P<bold>\S(?:.*?\S)?)\*\*"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^*]*[^\s*])?)\*(?![\w*])"
    r"|~~(?P<struck>\S(?:.*?\S)?)~~"
    r"|\[(?P<label>[^\]\n]+)\]\((?P<link>[^)\s]+)\)"
)


class MarkdownStream:
    """Draws an answer on a terminal of ANSI sequences: `push` its pieces, then `end` once.

    A line that is complete is never drawn again, but for the rows of a table: it is drawn when its last one is known.
    Text between <think> and </think> is dim.
    """

    def __init__(self, out: TextIO, width: int, height: int, color: bool) -> None:
        self._out, self._width, self._height = out, max(20, width - 1), height
        self._color = color
        self._line = ""
        self._shown: list[str] = []
        self._code: list[str] | None = None
        self._fence = self._language = ""
        self._table: list[str] = []
        self._thinking = False

    def push(self, text: str) -> None:
        """Draw more text."""
        head, *rest = text.expandtabs(TABS).split("\n")
        self._line += UNPRINTABLE.sub("", head)
        for part in rest:
            self._complete()
            self._line = UNPRINTABLE.sub("", part)
        if self._line:
            self._draw(self._rows(self._line))

    def end(self) -> None:
        """Draw what is left, and leave the cursor at the beginning of a line."""
        if self._line:
            self._complete()
        self._end_table()

    def _complete(self) -> None:
        line, self._line = self._line, ""
        if self._code is None and ROW.match(line):
            self._draw(self._rows(line))
            self._table.append(line)
            return
        self._end_table()
        self._draw(self._rows(line))
        self._keep()
        self._note(line)

    def _note(self, line: str) -> None:
        """Go on in a block of code or thoughts, or leave it."""
        found = FENCE.match(line)
        if self._code is not None:
            if found and not found[2] and found[1].startswith(self._fence):
                self._code = None
            else:
                self._code.append(line)
        elif found:
            self._code, self._fence, self._language = [], found[1], found[2]
        elif line.strip() in ("<think>", "</think>"):
            self._thinking = line.strip() == "<think>"

    def _rows(self, line: str) -> list[str]:
        """What the terminal shows below the last complete line: rows of a table that has not ended, and `line`."""
        if self._code is not None:
            return self._rendered(self._highlighted(line))
        raw = [row[: self._width] for row in self._table]
        return raw + (self._rendered(self._styled(line)) if line or not raw else [])

    def _end_table(self) -> None:
        """Draw the rows of a table as one, unless they are no table or do not fit on the screen."""
        table, self._table = self._table, []
        if not table:
            return
        if len(table) > 1 and DIVIDER.match(table[1]) and len(self._shown) < self._height:
            self._draw(self._rendered(_table(table)))
        self._keep()

    def _highlighted(self, line: str) -> RenderableType:
        """The last line of a block of code, with the colours that it has behind the others."""
        assert self._code is not None
        if FENCE.match(line) and line.strip().startswith(self._fence):
            return Text(line, style="dim")
        code = "\n".join([*self._code[-200:], line])
        shown = Syntax(code, self._language or "text", theme="ansi_dark", background_color="default").highlight(code)
        lines = shown.split("\n", allow_blank=True)
        return Padding(lines[min(len(self._code[-200:]), len(lines) - 1)], (0, 0, 0, 2))

    def _styled(self, line: str) -> RenderableType:
        if self._thinking or line.strip() in ("<think>", "</think>"):
            return Text(line, style="dim")
        if FENCE.match(line):
            return Text(line, style="dim")
        if found := HEADING.match(line):
            return inline(found[2], "bold underline" if len(found[1]) < 3 else "bold")
        if RULE.match(line):
            return Rule(style="dim")
        if found := ITEM.match(line):
            mark = "•" if found[2] in "-*+" else found[2]
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row(Text(found[1] + mark, style="cyan"), inline(found[3]))
            return grid
        if found := QUOTE.match(line):
            return Text("│ ", style="dim") + inline(found[1], "italic")
        return inline(line)

    def _rendered(self, shown: RenderableType) -> list[str]:
        """The rows of something, with the terminal's sequences for colours."""
        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=self._width,
            force_terminal=True,
            no_color=not self._color,
            highlight=False,
            color_system="standard",
        )
        console.print(shown)
        return [row.rstrip() for row in buffer.getvalue().removesuffix("\n").split("\n")]

    def _draw(self, rows: list[str]) -> None:
        """Bring the screen to `rows` from those that it shows, writing from the first one that differs."""
        same = 0
        while same < min(len(rows), len(self._shown)) and rows[same] == self._shown[same]:
            same += 1
        if same == len(rows) == len(self._shown):
            return
        same = min(same, len(rows) - 1)
        up = max(0, len(self._shown) - 1 - same)
        if up >= self._height:  # the rows have left the screen
            same, up = len(self._shown) - 1, 0
        move = f"\x1b[{up}A" if up else ""
        if same == len(self._shown) > 0:
            self._out.write("\r\n".join(["", *rows[same:]]))
        else:
            self._out.write(f"{move}\r\x1b[J" + "\r\n".join(rows[same:]))
        self._out.flush()
        self._shown = rows

    def _keep(self) -> None:
        """Leave what is shown as it is, and begin a new line."""
        if not self._shown:
            return
        self._out.write("\r\n")
        self._out.flush()
        self._shown = []


def inline(text: str, style: str = "") -> Text:
    """A text with the marks within a line: code, bold, italic, struck and links."""
    shown, at = Text(style=style), 0
    for found in MARKS.finditer(text):
        shown.append(text[at : found.start()])
        at = found.end()
        if found["in_code"] is not None:
            shown.append(found["in_code"].strip() or found["in_code"], style="bold cyan")
        elif found["bold"] is not None:
            shown.append_text(inline(found["bold"], "bold"))
        elif found["italic"] is not None:
            shown.append(found["italic"], style="italic")
        elif found["struck"] is not None:
            shown.append(found["struck"], style="strike")
        else:
            shown.append(found["label"], style="underline")
            shown.append(f" ({found['link']})", style="dim")
    shown.append(text[at:])
    return shown


def _table(lines: list[str]) -> Table:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    table = Table(header_style="bold", border_style="dim")
    for name, mark in zip(rows[0], [*rows[1], *[""] * len(rows[0])], strict=False):
        right = mark.endswith(":")
        table.add_column(
            inline(name), justify="center" if right and mark.startswith(":") else "right" if right else "left"
        )
    for row in rows[2:]:
        table.add_row(*(inline(cell) for cell in row[: len(rows[0])]))
    return table
