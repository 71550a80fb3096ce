"""Encoded images, which anybody may send, as RGB: within limits, and turned as their camera was held.

Size and frames are read from the header before anything is decoded (`quire.images.image_headers`). What Pillow makes
of a file that is broken in its own way is a `BadRequest` here.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.core.errors import BadRequest
from quire.images.image_headers import check_work, format_of, too_many_frames

if TYPE_CHECKING:
    from PIL import Image

BAND = 1 << 20
"""Pixels that are laid on white at a time: whole, an image would be there four times."""
ORIENTATION = 0x0112
_TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
          7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip
"""EXIF's orientation -> what turns the image upright."""
_TOLD = 200
"""Characters of a decoder's words that are told."""


@dataclass(frozen=True)
class DecodeLimits:
    """What an encoded image may have at most: `bytes`, `pixels` and pixels of a `side`, as its header says, `frames`.

    A decoder holds 4 bytes a pixel, that of a progressive JPEG 6 more; converting takes another 4.
    """

    bytes: int = 32 << 20
    pixels: int = 50_000_000
    side: int = 20_000
    frames: int = 1_000


def pillow() -> Any:
    """The module PIL.Image; `BadRequest` says how to come by it."""
    try:
        from PIL import Image
    except ImportError:
        raise BadRequest("images are read by Pillow, which is not installed: pip install 'quire[vision]'") from None
    return Image


def read_image(data: bytes, limits: DecodeLimits = DecodeLimits()) -> Image.Image:
    """The first frame of `data` as RGB; transparency is laid on white, as transformers does since 5.

    `BadRequest` with the reason for what is empty, too large, of a format that is not read, or broken.
    """
    opener = pillow()
    if not data:
        raise BadRequest("the image is empty: it has 0 bytes")
    if len(data) > limits.bytes:
        raise BadRequest(f"the image has {len(data):,} bytes; {limits.bytes:,} are allowed")
    name = format_of(data)
    check_work(name, data, limits.frames)
    try:
        with opener.open(io.BytesIO(data), formats=(name,)) as image:
            _check(image, limits)
            image.load()
            return to_rgb(_upright(image))
    except BadRequest:
        raise
    except Exception as error:  # of a dozen types: each decoder has its own for files that are broken
        told = str(error)[:_TOLD] or type(error).__name__
        raise BadRequest(f"the image cannot be read as {name}: {told}") from None


def _check(image: Image.Image, limits: DecodeLimits) -> None:
    width, height = image.size
    if max(width, height) > limits.side:
        raise BadRequest(f"the image has {width:,} x {height:,} pixels; {limits.side:,} are allowed for a side")
    if width * height > limits.pixels:
        raise BadRequest(f"the image has {width:,} x {height:,} = {width * height:,} pixels; {limits.pixels:,} are "
                         "allowed")  # fmt: skip
    if width < 1 or height < 1:
        raise BadRequest(f"the image has no pixels: {width} x {height}")
    # GIF and TIFF find their number by reading all frames: `check_work` has counted them.
    if image.format in ("PNG", "WEBP", "MPO") and getattr(image, "n_frames", 1) > limits.frames:
        raise too_many_frames(limits.frames)


def _upright(image: Image.Image) -> Image.Image:
    """Turned by EXIF's orientation; one that cannot be read says nothing, and viewers show the image as it lies."""
    try:
        turn = _TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return image
    return image if turn is None else image.transpose(getattr(pillow().Transpose, turn))


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB without notes; one that is so already is not copied.

    16 bits a channel lose the lower 8, and transparency is laid on white. `BadRequest` for numbers without a range
    that is black to white.
    """
    if image.mode == "RGB" and not image.info:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = _high_byte(image)
    elif image.mode in ("I", "F"):
        raise BadRequest(f"the image has {'integers' if image.mode == 'I' else 'floats'} of 32 bits, whose black and "
                         "white no file says; send it in 8 or 16 bits a channel")  # fmt: skip
    try:
        clear = "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None
        found = _on_white(image) if clear else image.convert("RGB")
    except (ValueError, OSError) as error:
        raise BadRequest(f"the image's mode {image.mode!r} cannot be converted to RGB: {str(error)[:_TOLD]}") from None
    found.info = {}
    return found


def _high_byte(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    high = (np.clip(values, 0, 65535) >> 8).astype(np.uint8)
    found = pillow().fromarray(high)
    level = image.info.get("transparency")
    if isinstance(level, int):
        alpha = np.where(values == level, 0, 255).astype(np.uint8)
        found = pillow().merge("LA", (found, pillow().fromarray(alpha)))
    return found  # type: ignore[no-any-return]


def _on_white(image: Image.Image) -> Image.Image:
    """`image` over white, a band of rows at a time."""
    opener = pillow()
    found = opener.new("RGB", image.size)
    width, height = image.size
    rows = max(1, BAND // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        if band.mode == "La":
            band = band.convert("LA")
        white = opener.new("RGBA", band.size, (255, 255, 255, 255))
        found.paste(opener.alpha_composite(white, band.convert("RGBA")).convert("RGB"), (0, top))
    return found  # type: ignore[no-any-return]
