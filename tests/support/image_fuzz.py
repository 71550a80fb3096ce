"""Broken images, read one after the other."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path

from image_files import FORMATS, animation, encoded, sample_image
from quire.core.errors import BadRequest
from quire.images.decoding import DecodeLimits, read_image

LIMITS = DecodeLimits(bytes=1 << 20, pixels=4_000_000, side=4000, frames=50)
MEMORY = 200 << 20
"""Bytes beyond those at rest: a decoder's 10 for each of 4 million pixels, converting, and as much again."""


def originals() -> list[bytes]:
    """Files of every format, plain, clear, in grey, animated, progressive."""
    photo = sample_image(60, 80)
    clear, grey = photo.copy(), photo.convert("L")
    clear.putalpha(grey)
    found = [encoded(photo, form) for form in FORMATS]
    found += [encoded(clear, form) for form in ("PNG", "WEBP", "TIFF")]
    found += [encoded(photo.quantize(16), form) for form in ("PNG", "GIF", "BMP", "TIFF")]
    found += [animation(form, 4) for form in ("PNG", "GIF", "WEBP", "TIFF")]
    found += [encoded(photo, "JPEG", progressive=True), encoded(photo.convert("CMYK"), "JPEG")]
    found += [encoded(photo, "TIFF", compression=kind) for kind in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")]
    return found


def mutated(rng: random.Random, files: list[bytes]) -> bytes:
    """Bits turned, parts cut off, repeated or zeroed, numbers made huge, the head of one file on another's body."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randrange(1, 4)):
        kind, at = rng.randrange(6), rng.randrange(max(1, len(data)))
        if kind == 0:
            for _ in range(rng.randrange(1, 30)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randrange(1, 400)] * rng.randrange(1, 40)
        elif kind == 3:
            data[at : at + rng.randrange(1, 60)] = bytes(rng.randrange(1, 60))
        elif kind == 4:
            head = rng.randrange(min(200, len(data)))
            data[head : head + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\x0f\xff", b"\xff\0\0\0")
            )
        else:
            other = rng.choice(files)
            data[: min(at, 200)] = other[: rng.randrange(1, 200)]
        if not data:
            break
    return bytes(data)


def most_memory() -> int:
    """Bytes that this program has had at most; what getrusage tells begins with those of the one that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def read_all(count: int, seed: int) -> None:
    """Read `count` of them, and say how it went."""
    warnings.simplefilter("ignore")
    rng, files = random.Random(seed), originals()
    for data in files:
        read_image(data, LIMITS)
    rest = most_memory()
    read = refused = 0
    longest = 0.0
    for i in range(count):
        data = mutated(rng, files)
        begun = time.perf_counter()
        try:
            found = read_image(data, LIMITS)
            assert found.mode == "RGB" and found.width * found.height <= LIMITS.pixels, i
            read += 1
        except BadRequest as error:
            assert error.message, i
            refused += 1
        longest = max(longest, time.perf_counter() - begun)
    grown = most_memory() - rest
    largest = read_image(encoded(sample_image(2000, 2000), "JPEG", progressive=True), LIMITS)
    assert largest.size == (2000, 2000) and most_memory() - rest > 20 << 20
    print(f"{read} read, {refused} refused, longest {longest:.2f} s, {grown >> 20} MiB grown")
    assert grown < MEMORY and longest < 10
