"""What encoded images say of themselves, read without decoding: their format, and how much work reading them is.

A decoder works off whatever a file lists. So what files list without limit is counted here: frames, scans of a
progressive JPEG, chunks and segments, each of which costs a few bytes of the file and up to all pixels of work.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from quire.core.errors import BadRequest

READ = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")
MOST_SCANS = 100
"""Of a JPEG: encoders write ten or so; each takes the decoder over all blocks of the image (libtiff's bound, too)."""
MOST_PARTS = 1 << 16
"""Segments, chunks or blocks of a file: PNG's usual chunks of 8 KiB would be 512 MiB."""
MOST_EXIF = 64
"""Segments of a JPEG's EXIF: Pillow joins them one by one, in time that grows by the square of their number."""
MOST_STRIPS = 1 << 18
MOST_TILE = 1 << 12
"""Pixels of a side of a TIFF's tiles, each of which is decoded whole, however small the image is."""
MOST_RUNS = 4 << 20
"""Bytes of a BMP in runs, which Pillow decodes in Python."""

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (8, b"WEBP", "WebP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (4, b"ftyp", "a video (MP4)"),
    (0, b"\x1aE\xdf\xa3", "a video (Matroska or WebM)"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"%!PS", "PostScript"),
    (0, b"%PDF", "PDF"),
    (0, b"qoif", "QOI"),
)
_TEXTS = (
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE\s+svg[^>]*>\s*)?<svg[\s>]", re.S | re.I), "SVG"),
    (re.compile(rb"\s*<(!DOCTYPE\s+html|html|head|body)\b", re.I), "an HTML page"),
    (re.compile(rb"P[1-7]\s"), "Netpbm"),
)
_HEAD = 1024


def format_of(data: bytes) -> str:
    """Name of the format, one of `READ`; `BadRequest` says by name which other format it is, as far as it is known."""
    head = data[:_HEAD]
    name = next((name for at, sign, name in _SIGNATURES if head[at : at + len(sign)] == sign), None)
    if name == "WebP" and not head.startswith(b"RIFF"):
        name = None
    if name is None:
        name = next((name for pattern, name in _TEXTS if pattern.match(head)), None)
    if name in READ:
        return str(name)
    read = ", ".join(READ[:-1]) + f" and {READ[-1]}"
    if name is None:
        raise BadRequest(f"the data is no image of a known format; {read} are read")
    raise BadRequest(f"the data is {name}, which is not read; {read} are")


def check_work(name: str, data: bytes, most_frames: int) -> None:
    """`BadRequest` for a file of the format `name` that lists more than a decoder should be given to work off."""
    _CHECKS.get(name, _unchecked)(data, most_frames)


def too_many_frames(most: int) -> BadRequest:
    """The refusal of an animation or a file of many pages."""
    return BadRequest(f"the image has more than {most:,} frames")


def _unchecked(data: bytes, most_frames: int) -> None:
    """WebP: its decoder tells the number of frames before it decodes one."""


def _too_many(what: str, most: int) -> BadRequest:
    return BadRequest(f"the image has more than {most:,} {what}, which no camera or program writes")


_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1


def _check_jpeg(data: bytes, most_frames: int) -> None:
    at, scans, segments, exif = 2, 0, 0, 0
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == _EOI:
            return
        if marker in (0x01, _SOI):
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        segments += 1
        scans += marker == _SOS
        exif += marker == _APP1 and data[at + 2 : at + 8] == b"Exif\0\0"
        if scans > MOST_SCANS:
            raise _too_many("scans", MOST_SCANS)
        if segments > MOST_PARTS:
            raise _too_many("segments", MOST_PARTS)
        if exif > MOST_EXIF:
            raise _too_many("segments of EXIF", MOST_EXIF)
        at += max(length, 2)


def _check_png(data: bytes, most_frames: int) -> None:
    at = 8
    for _ in range(MOST_PARTS):
        if at + 8 > len(data):
            return
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"acTL" and int.from_bytes(data[at + 8 : at + 12], "big") > most_frames:
            raise too_many_frames(most_frames)
        at += 12 + length
    raise _too_many("chunks", MOST_PARTS)


def _check_gif(data: bytes, most_frames: int) -> None:
    at, frames = 13 + _palette(data, 10), 0
    for _ in range(MOST_PARTS + most_frames):
        kind = data[at : at + 1]
        if kind == b"!":
            at = _behind_blocks(data, at + 2)
        elif kind == b",":
            frames += 1
            if frames > most_frames:
                raise too_many_frames(most_frames)
            at = _behind_blocks(data, at + 11 + _palette(data, at + 9))
        else:
            return
    raise _too_many("extensions", MOST_PARTS)


def _palette(data: bytes, at: int) -> int:
    """Bytes of the palette that the flags at `at` announce."""
    flags = data[at] if at < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    """Where the sub-blocks from `at` on end."""
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1


def _check_bmp(data: bytes, most_frames: int) -> None:
    runs = len(data) >= 34 and int.from_bytes(data[30:34], "little") in (1, 2)
    if runs and len(data) > MOST_RUNS:
        raise BadRequest(f"the image is a BMP in runs of more than {MOST_RUNS >> 20} MiB; send it as PNG")


_STRIPS = frozenset({273, 279, 324, 325})
"""Tags that list where strips or tiles begin and how long they are."""
_TILE = frozenset({322, 323})
_NUMBERS = {3: "H", 4: "I"}
"""Types of whole numbers that tags have."""


def _check_tiff(data: bytes, most_frames: int) -> None:
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    first, count, entry = (8, "Q", "HHQ8s") if big else (4, "H", "HHI4s")
    link, number, tag = (struct.Struct(order + form) for form in ("Q" if big else "I", count, entry))
    at = _number(link, data, first)
    for _ in range(most_frames):
        if not at:
            return
        entries = _number(number, data, at)
        begin = at + number.size
        if entries > MOST_PARTS:
            raise _too_many("tags", MOST_PARTS)
        for i in range(entries):
            name, kind, listed, value = tag.unpack(_part(data, begin + i * tag.size, tag.size))
            if name in _STRIPS and listed > MOST_STRIPS:
                raise _too_many("strips or tiles", MOST_STRIPS)
            if name in _TILE and struct.unpack_from(order + _NUMBERS.get(kind, "I"), value)[0] > MOST_TILE:
                raise BadRequest(f"the image has tiles of more than {MOST_TILE:,} pixels a side")
        at = _number(link, data, begin + entries * tag.size)
    if at:
        raise too_many_frames(most_frames)


def _number(form: struct.Struct, data: bytes, at: int) -> int:
    return int(form.unpack(_part(data, at, form.size))[0])


def _part(data: bytes, at: int, size: int) -> bytes:
    """Zeros behind the end: what is cut off is the decoder's to refuse."""
    return data[at : at + size].ljust(size, b"\0")


_CHECKS: dict[str, Callable[[bytes, int], None]] = {
    "JPEG": _check_jpeg, "PNG": _check_png, "GIF": _check_gif, "BMP": _check_bmp, "TIFF": _check_tiff,
}  # fmt: skip
