"""Photographs made of numbers, and encoded files: those of every format, odd ones, broken ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from seeing import url_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def photograph(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]: gradients, an edge, and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin(y / (3 + 7 * c) + c) + np.cos(x / (5 + 4 * c) - seed) for c in range(3)]
    found = 128 + 50 * np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    found[height // 3 :, : width // 2] += 40
    return np.clip(found, 0, 255).astype(np.uint8)


def sample_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """The same as RGB."""
    return Image.fromarray(photograph(height, width, seed))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def animation(form: str, count: int, **options: Any) -> bytes:
    """A file of `count` frames (TIFF: pages), each of a colour of its own, the first red."""
    colors = [(250, 0, 0), *((0, (i * 37) % 256, (i * 91) % 256) for i in range(count - 1))]
    frames = [Image.new("RGB", (20, 12), color) for color in colors]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, rows: bytes, more: Sequence[bytes] = ()) -> bytes:
    """A PNG of raw `rows`, each behind its filter byte, with chunks before them."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_png(values: NDArray[np.uint16]) -> bytes:
    """16 bits a channel, [height, width, 3]."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(width, height, 16, 2, rows)


def huge_headers() -> dict[str, bytes]:
    """Files of a few bytes whose headers promise 1,600 million pixels (WebP: 268; GIF: 4,295)."""
    side = 40_000
    bmp = bytearray(encoded(Image.new("RGB", (4, 4)), "BMP"))
    bmp[18:26] = struct.pack("<ii", side, side)
    gif = bytearray(encoded(Image.new("P", (4, 4)), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    webp = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4 + b"\xfe\x3f\0\xfe\x3f\0" + b"VP8L" + struct.pack("<I", 0)
    tags = [(256, 4, side), (257, 4, side), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 4, side),
            (279, 4, 16)]  # fmt: skip
    ifd = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, k, 1, v) for t, k, v in tags) + b"\0" * 4
    jpeg = bytearray(encoded(Image.new("RGB", (4, 4)), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", side, side)
    return {
        "PNG": png(side, side, 8, 2, b"\0" * 100),
        "JPEG": bytes(jpeg),
        "WebP": b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
        "GIF": bytes(gif),
        "BMP": bytes(bmp),
        "TIFF": struct.pack("<2sHI", b"II", 42, 8) + ifd,
    }


def scan_bomb(scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(sample_image(64, 64), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:last] + data[last:end] * scans + data[end:]


def exif_bomb(segments: int) -> bytes:
    """A JPEG with its EXIF in many segments."""
    data = encoded(sample_image(8, 8), "JPEG")
    return data[:2] + b"\xff\xe1\0\x09Exif\0\0x" * segments + data[2:]


def strip_bomb() -> bytes:
    """A TIFF that lists a million strips."""
    count = 1_000_000
    tags = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, count, 200),
            (278, 4, 1, 1), (279, 4, count, 200)]  # fmt: skip
    ifd = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + b"\0" * 4
    return (struct.pack("<2sHI", b"II", 42, 8) + ifd).ljust(200, b"\0") + b"\0" * (4 * count)


def tile_bomb() -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of 26,000 x 26,000."""
    tags = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (322, 4, 1, 26_000),
            (323, 4, 1, 26_000), (324, 4, 1, 200), (325, 4, 1, 9)]  # fmt: skip
    ifd = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + b"\0" * 4
    return (struct.pack("<2sHI", b"II", 42, 8) + ifd).ljust(200, b"\0") + zlib.compress(b"")


def tiled_tiff(values: NDArray[np.uint8]) -> bytes:
    """Grey [32, 32] in four tiles, numbers with the high byte first."""
    tiles = b"".join(values[y : y + 16, x : x + 16].tobytes() for y in (0, 16) for x in (0, 16))
    tags = [(256, 3, 1, 32 << 16), (257, 3, 1, 32 << 16), (258, 3, 1, 8 << 16), (259, 3, 1, 1 << 16),
            (262, 3, 1, 1 << 16), (322, 3, 1, 16 << 16), (323, 3, 1, 16 << 16), (324, 4, 4, 200),
            (325, 4, 4, 216)]  # fmt: skip
    ifd = struct.pack(">H", len(tags)) + b"".join(struct.pack(">HHII", *tag) for tag in tags) + b"\0" * 4
    head = (struct.pack(">2sHI", b"MM", 42, 8) + ifd).ljust(200, b"\0")
    return head + struct.pack(">8I", *(232 + 256 * i for i in range(4)), *[256] * 4) + tiles


def runs_bmp(nbytes: int) -> bytes:
    """A BMP in runs, each of a row."""
    head = struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 8, 1, nbytes, 0, 0, 256, 0)
    begin = 14 + len(head) + 1024
    return (
        struct.pack("<2sIHHI", b"BM", begin + nbytes, 0, 0, begin) + head + b"\0" * 1024 + b"\4\7\0\0" * (nbytes // 4)
    )


def png_url(image: Image.Image) -> str:
    held = io.BytesIO()
    image.save(held, "PNG")
    return url_of(held.getvalue())
