"""Encoded images: the right one, or a refusal with the reason; nothing that a file promises is worked off."""

from __future__ import annotations

import io
import struct
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_files import (
    FORMATS,
    animation,
    chunk,
    deep_png,
    encoded,
    exif_bomb,
    huge_headers,
    photograph,
    png,
    runs_bmp,
    sample_image,
    scan_bomb,
    strip_bomb,
    tile_bomb,
    tiled_tiff,
)
from quire.core.errors import BadRequest
from quire.images.decoding import DecodeLimits, read_image, to_rgb

PHOTO = sample_image(24, 36)


USUAL = DecodeLimits()


def read(data: bytes, limits: DecodeLimits = USUAL) -> NDArray[np.uint8]:
    """What is read, as numbers; it is RGB without notes."""
    found = read_image(data, limits)
    assert found.mode == "RGB" and not found.info
    return np.asarray(found)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form: str) -> None:
    if form in ("JPEG", "GIF"):  # lossy: as Pillow's own reading is
        data = encoded(PHOTO, form)
        assert np.abs(read(data).astype(int) - np.asarray(PHOTO)).mean() < 12
    else:
        np.testing.assert_array_equal(read(encoded(PHOTO, form, lossless=True)), np.asarray(PHOTO))


def clear() -> Image.Image:
    """Red that becomes clear from left to right."""
    pixels = np.zeros((8, 16, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[..., 3] = np.arange(16) * 17
    return Image.fromarray(pixels)


def on_white(image: Image.Image) -> NDArray[np.uint8]:
    """By Pillow's own composition."""
    rgba = image.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"))


GREY = (np.arange(24 * 36, dtype=np.uint32) * 75 % 65536).astype(np.uint16).reshape(24, 36)
DEEP = np.stack([GREY, GREY[::-1], 65535 - GREY], -1)
PALETTE = PHOTO.quantize(16)
CMYK = PHOTO.convert("CMYK")
ODD: dict[str, tuple[Callable[[], bytes], Callable[[], NDArray[np.uint8]]]] = {
    "CMYK": (lambda: encoded(CMYK, "TIFF"), lambda: np.asarray(CMYK.convert("RGB"))),
    "16 bit": (lambda: deep_png(DEEP), lambda: (DEEP >> 8).astype(np.uint8)),
    "16 bit grey": (lambda: encoded(Image.fromarray(GREY)), lambda: np.stack([(GREY >> 8).astype(np.uint8)] * 3, -1)),
    "16 bit TIFF": (
        lambda: encoded(Image.fromarray(GREY), "TIFF"), lambda: np.stack([(GREY >> 8).astype(np.uint8)] * 3, -1)
    ),
    "tiles": (lambda: tiled_tiff(photograph(32, 32)[..., 0]), lambda: photograph(32, 32)[..., [0, 0, 0]]),
    "large TIFF": (lambda: encoded(PHOTO, "TIFF", big_tiff=True), lambda: np.asarray(PHOTO)),
    "runs": (lambda: runs_bmp(16), lambda: np.zeros((4, 4, 3), np.uint8)),
    "RGBA": (lambda: encoded(clear()), lambda: on_white(clear())),
    "RGBA WebP": (lambda: encoded(clear(), "WEBP", lossless=True, exact=True), lambda: on_white(clear())),
    "LA": (lambda: encoded(clear().convert("LA")), lambda: on_white(clear().convert("LA"))),
    "palette": (lambda: encoded(PALETTE), lambda: np.asarray(PALETTE.convert("RGB"))),
    "palette, one colour clear": (
        lambda: encoded(PALETTE, transparency=3),
        lambda: np.where((np.asarray(PALETTE) == 3)[..., None], 255, np.asarray(PALETTE.convert("RGB"))),
    ),
    "palette, colours half clear": (
        lambda: encoded(PALETTE, transparency=bytes(range(0, 256, 16))),
        lambda: half_clear(),
    ),
    "one colour clear": (
        lambda: png(2, 1, 8, 2, b"\0\x09\x08\x07\x01\x02\x03", [chunk(b"tRNS", struct.pack(">3H", 9, 8, 7))]),
        lambda: np.array([[[255, 255, 255], [1, 2, 3]]], np.uint8),
    ),
    "1 bit": (
        lambda: encoded(Image.fromarray(GREY > 30000)),
        lambda: np.stack([(GREY > 30000).astype(np.uint8) * 255] * 3, -1),
    ),
    "1 x 10,000": (lambda: encoded(sample_image(10_000, 1)), lambda: photograph(10_000, 1)),
    "10,000 x 1": (lambda: encoded(sample_image(1, 10_000)), lambda: photograph(1, 10_000)),
    "one pixel": (lambda: encoded(sample_image(1, 1), "BMP"), lambda: photograph(1, 1)),
    "broken EXIF": (lambda: encoded(PHOTO, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), lambda: np.asarray(PHOTO)),
    **{
        f"animated {form}": (
            lambda form=form: animation(form, 4, **({"lossless": True} if form == "WEBP" else {})),  # type: ignore[misc]
            lambda: np.broadcast_to(np.array([250, 0, 0], np.uint8), (12, 20, 3)),
        )
        for form in ("GIF", "PNG", "WEBP", "TIFF")
    },
}  # fmt: skip


def half_clear() -> NDArray[np.uint8]:
    """The palette's colours over white, each as clear as its number says."""
    image = PALETTE.copy()
    image.info["transparency"] = bytes(range(0, 256, 16))
    return on_white(image)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_files_are_the_right_image(name: str) -> None:
    made, expected = ODD[name]
    np.testing.assert_array_equal(read(made()), expected())


def test_cmyk_of_a_camera() -> None:
    """JPEG says of CMYK by Adobe's marker that it is inverted."""
    data = encoded(CMYK, "JPEG", quality=95)
    assert np.abs(read(data).astype(int) - np.asarray(PHOTO)).mean() < 8


def test_the_first_of_a_phones_images() -> None:
    """Phones put a second one behind it, in a format that looks like JPEG."""
    data = encoded(PHOTO, "MPO", save_all=True, append_images=[Image.new("RGB", PHOTO.size)])
    with Image.open(io.BytesIO(data)) as plain:
        assert plain.format == "MPO"
        np.testing.assert_array_equal(read(data), np.asarray(plain.convert("RGB")))
    with pytest.raises(BadRequest, match="more than 1 frames"):
        read_image(data, DecodeLimits(frames=1))


@pytest.mark.parametrize("form", ("JPEG", "PNG", "WEBP", "TIFF"))
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_the_camera_was_held(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PHOTO, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as plain:
        expected = ImageOps.exif_transpose(plain).convert("RGB")
    assert expected.size == (PHOTO.size if orientation < 5 else PHOTO.size[::-1])
    np.testing.assert_array_equal(read(data), np.asarray(expected))


def half(data: bytes) -> bytes:
    """The first half of a file."""
    return data[: len(data) // 2]


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "0 bytes"),
    "text": (lambda: b"what is this?", "no image of a known format; PNG, JPEG, WebP, GIF, BMP and TIFF are read"),
    "zeros": (lambda: b"\0" * 1000, "no image of a known format"),
    "page": (lambda: b"<!DOCTYPE html><html><body>404", "an HTML page"),
    "SVG": (lambda: b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "PDF": (lambda: b"%PDF-1.7\n", "PDF"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "AVIF": (lambda: b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
    "JPEG XL": (lambda: b"\xff\x0a\0\0", "JPEG XL"),
    "JPEG 2000": (lambda: b"\0\0\0\x0cjP  \r\n", "JPEG 2000"),
    "ICO": (lambda: b"\0\0\1\0\1\0", "ICO"),
    "Netpbm": (lambda: b"P6\n2 2\n255\n" + b"\0" * 12, "Netpbm"),
    "video": (lambda: b"\0\0\0\x18ftypmp42\0\0\0\0", "video"),
    "32-bit floats": (lambda: encoded(Image.new("F", (4, 4)), "TIFF"), "floats of 32 bits"),
    "32-bit integers": (lambda: encoded(Image.new("I", (4, 4)), "TIFF"), "integers of 32 bits"),
    "scans": (lambda: scan_bomb(101), "more than 100 scans"),
    "EXIF": (lambda: exif_bomb(65), "more than 64 segments of EXIF"),
    "chunks": (lambda: png(1, 1, 8, 0, b"\0\0", [chunk(b"teSt", b"")] * 70_000), "more than 65,536 chunks"),
    "tiles": (tile_bomb, "tiles of more than 4,096 pixels a side"),
    "runs": (lambda: runs_bmp(5 << 20), "a BMP in runs of more than 4 MiB"),
    "strips": (strip_bomb, "more than 262,144 strips"),
    **{f"truncated {f}": (lambda f=f: half(encoded(PHOTO, f)), "cannot be read as") for f in FORMATS},  # type: ignore[misc]
    **{f"header of {f}": (lambda f=f: encoded(PHOTO, f)[:12], "cannot be read as") for f in FORMATS},  # type: ignore[misc]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refusals_name_the_reason(name: str) -> None:
    made, reason = REFUSED[name]
    data = made()
    begun = time.process_time()
    with pytest.raises(BadRequest, match=reason):
        read_image(data)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("form", ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF"))
@pytest.mark.filterwarnings("ignore")
def test_what_headers_promise_is_not_made(form: str) -> None:
    data = huge_headers()[form]
    with pytest.raises(BadRequest, match=r"pixels; [\d,]+ are allowed|exceeds limit"):
        read_image(data)


def test_limits() -> None:
    data = encoded(PHOTO)
    with pytest.raises(BadRequest, match=f"{len(data):,} bytes; 1,000 are allowed"):
        read_image(data, DecodeLimits(bytes=1000))
    with pytest.raises(BadRequest, match="36 x 24 = 864 pixels; 863 are allowed"):
        read_image(data, DecodeLimits(pixels=863))
    with pytest.raises(BadRequest, match="36 x 24 pixels; 35 are allowed for a side"):
        read_image(data, DecodeLimits(side=35))
    assert read_image(data, DecodeLimits(bytes=len(data), pixels=864, side=36, frames=1)).size == (36, 24)


@pytest.mark.parametrize("form", ("GIF", "PNG", "WEBP", "TIFF"))
def test_frames_are_counted(form: str) -> None:
    data = animation(form, 5)
    with pytest.raises(BadRequest, match="more than 4 frames"):
        read_image(data, DecodeLimits(frames=4))
    assert read_image(data, DecodeLimits(frames=5)).size == (20, 12)


def test_an_image_that_is_rgb_is_not_copied() -> None:
    assert to_rgb(PHOTO) is PHOTO


def test_large_clear_images_are_laid_on_white_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.images.decoding.BAND", 50)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 23, 4), np.uint8))
    np.testing.assert_array_equal(np.asarray(to_rgb(image)), on_white(image))


def test_without_pillow_the_reason_is_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadRequest, match=r"pip install 'quire\[vision\]'"):
        read_image(b"\x89PNG")
