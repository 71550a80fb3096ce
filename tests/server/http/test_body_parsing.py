"""Bodies are read in pieces as the whole would be, what is in them is counted first, and each piece is small."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.server.http import parsing
from quire.server.http.parsing import MAX_DEPTH, MAX_GROUPS, MAX_VALUES, PIECE, read_json

STRINGS = (
    "",
    "a",
    "é",
    "😀",
    'a"b',
    "\\",
    "\\\\",
    '\\"',
    ",",
    "[",
    "]}",
    ":",
    "\n\t",
    "\u2028",
    "a, b: [c]",
    "\\u00e9",
)

WRONG = (b"", b"", b",", b"]", b"[", b"{", b"}", b'"', b"\\", b":", b" ", b"\xc3", b"1")
LONG = b'"aaaaaaaaaaaaaaaaaaaaaaaa"'


def value(rng: random.Random, depth: int) -> Any:
    """Any JSON, small pieces of which look like the marks of others."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return "".join(rng.choice(STRINGS) for _ in range(rng.choice((1, 2, 9, 60))))
    if kind < 5:
        return rng.choice((0, -1, 1.5, 1e300, True, False, None, 12345678901234567890))
    if kind < 7:
        return [value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3, 12)))]
    return {f"{rng.choice(STRINGS)}{i}": value(rng, depth - 1) for i in range(rng.choice((0, 1, 5, 9)))}


@pytest.fixture(params=[32, 64, 333])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces so small that everything is cut."""
    monkeypatch.setattr(parsing, "PIECE", request.param)
    return int(request.param)


def spaced(rng: random.Random, given: Any) -> bytes:
    return json.dumps(given, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1, 3))).encode()


def test_pieces_are_the_whole(piece: int) -> None:
    rng = random.Random(piece)
    for _ in range(100):
        given = value(rng, 5)
        data = spaced(rng, given)
        found = read_json(data)
        assert found == given and json.dumps(found) == json.dumps(given)
        assert read_json(b" \n" + data + b"\r\t ") == given


def test_pieces_refuse_what_the_whole_would(piece: int) -> None:
    """One byte is taken away, put in or changed: what Python's reader refuses is refused, else they agree."""
    rng = random.Random(piece)
    refused = 0
    for _ in range(400):
        data = bytearray(spaced(rng, value(rng, 4)))
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(2)] = rng.choice(WRONG)
        try:
            expected = parsing._strict(bytes(data))
        except BadRequest:
            refused += 1
            with pytest.raises(BadRequest):
                read_json(bytes(data))
        else:
            assert read_json(bytes(data)) == expected
    assert refused > 120


@pytest.mark.parametrize(
    "data",
    [b"[1,,2]", b"[1,]", b"[,1]", b'{"a":1,}', b'{"a":1,,"b":2}', b'{"a" 1}', b"{1:2}", b"[1] [2]", b"[1}",
     b'"a" "b"', b"", b" ", b'"\\ud800"', b'"\\ud83d" ', b"[NaN]", b'{"a":1,"a":2}', b"{%b:1,%b:2}" % (LONG, LONG),
     b"[" + b"1" * 5000 + b"]", b"1" * 90_000, b'"\\u12"', b'"' + b"\\" * 41 + b'"', b"[" * 300 + b"]" * 300],
)  # fmt: skip
@pytest.mark.parametrize("around", [b"%b", b'{"x":"' + b"y" * 70_000 + b'","z":%b}', b"[" + b"0," * 40_000 + b"%b]"])
def test_what_is_wrong_is_refused_wherever_it_stands(data: bytes, around: bytes) -> None:
    with pytest.raises(BadRequest):
        read_json(around % data)


def test_escapes_are_never_cut(piece: int) -> None:
    for unit in ("\\ud83d\\ude00", "\\\\", '\\"', "\\u00e9", "é", "😀", "\\n", 'a\\\\\\"'):
        for lead in range(13):
            data = ('["' + "a" * lead + unit * 200 + '"]').encode()
            assert read_json(data) == json.loads(data)


def test_values_and_depth_are_counted_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    strict = parsing._strict
    monkeypatch.setattr(parsing, "_strict", lambda data, at=None: (read.append(len(data)), strict(data, at))[1])
    for item, told in ((b"1,", "values"), (b'"",', "values"), (b"[],", "lists and objects"), (b"{},", "lists")):
        with pytest.raises(BadRequest, match=f"more than {MAX_VALUES if told == 'values' else MAX_GROUPS} {told}"):
            read_json(b"[%b1]" % (item * (MAX_VALUES if told == "values" else MAX_GROUPS)))
    for count in (MAX_DEPTH + 1, 1000, 10_000, 1_000_000):
        with pytest.raises(BadRequest, match="nested too deeply"):
            read_json(b"[" * count)
    assert not read
    assert len(read_json(b"[" + b"1," * (MAX_VALUES - 3) + b"1]")) == MAX_VALUES - 2
    assert max(read) <= PIECE + 2 and len(read) >= 2 * MAX_VALUES // PIECE, "no piece is large"
    text = "a, [b]: " * 500_000
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}, "what is in strings is not counted"
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(read_json(deep)).encode() == deep
