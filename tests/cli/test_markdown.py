"""Markdown on a terminal: what is on the screen at the end, however the text was cut, and how little is drawn twice."""

from __future__ import annotations

import io
import random
import re

import pytest

from quire.cli.chat.markdown import MarkdownStream, inline
from quire.cli.chat.screen import show_answer

TOKEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]")
TEXT = """# A title
Some **bold**, *slanted* and `code`; __init__ and 2*3*4 stay.

- an item that is long enough to be wrapped, since the screen has but forty columns
1. a number

| name | size |
|------|-----:|
| a    |   12 |
| b    |    7 |
text behind the table
> a quote
---
```python
def f(x):
    return x  # done
```
<think>
a thought
</think>
the [end](http://a.example)"""
SHOWN = """A title
Some bold, slanted and code; __init__
and 2*3*4 stay.

• an item that is long enough to be
  wrapped, since the screen has but
  forty columns
1. a number

┏━━━━━━┳━━━━━━┓
┃ name ┃ size ┃
┡━━━━━━╇━━━━━━┩
│ a    │   12 │
│ b    │    7 │
└──────┴──────┘
text behind the table
│ a quote
───────────────────────────────────────
```python
  def f(x):
      return x  # done
```
<think>
a thought
</think>
the end (http://a.example)
"""


def screen(drawn: str) -> str:
    """What a terminal shows that was sent `drawn`."""
    rows, row, column = [""], 0, 0
    for token in TOKEN.findall(drawn):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif token.startswith("\x1b["):
            row -= int(token[2:-1]) if token[-1] == "A" else 0
            if token[-1] == "J":
                rows[row] = rows[row][:column]
                del rows[row + 1 :]
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in rows)


def drawn(pieces: list[str], height: int = 40) -> str:
    out = io.StringIO()
    stream = MarkdownStream(out, 40, height, color=True)
    for piece in pieces:
        stream.push(piece)
    stream.end()
    return out.getvalue()


@pytest.mark.parametrize("seed", range(5))
def test_the_screen_is_the_same_however_the_text_is_cut(seed: int) -> None:
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(TEXT):
        size = rng.choice((1, 2, 5, 40))
        pieces.append(TEXT[at : at + size])
        at += size
    assert screen(drawn(pieces)) == SHOWN


def test_colours_are_there_and_complete_lines_are_drawn_once() -> None:
    whole = drawn([f"line {number}\n" for number in range(50)])
    assert whole.count("\x1b[J") <= 50 and "\x1b[1A" not in whole
    assert "\x1b[" in drawn(["```python\nimport os\n```"]).split("import")[0]


def test_what_commands_a_terminal_is_left_out() -> None:
    assert "\x1b]0;" not in drawn(["a \x1b]0;title\x07 b\x1b[2Jc\n"]) and "\x07" not in drawn(["\x07"])


def test_a_table_that_left_the_screen_stays_as_it_was_written() -> None:
    rows = ["| a | b |\n", "|---|---|\n", *(f"| {number} | x |\n" for number in range(30))]
    found = screen(drawn(rows, height=10))
    assert "| 29 | x |" in found and found.count("| a | b |") == 1


def test_marks_within_a_line() -> None:
    assert inline("a **b** `c*d*` ~~e~~ x*y*z").plain == "a b c*d* e x*y*z"
    assert inline("** no ** * none *").plain == "** no ** * none *"


def test_plain_text_where_it_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_answer(["**a", "**"], drawn=False) == "**a**"
    assert capsys.readouterr().out == "**a**\n"
