"""Where images of prompts come from: URLs that hold them, files of an allowed folder, and objects of the caller's.

Nothing here fetches anything over a network; `quire.server.text_generation.fetching` does, where it was told which
hosts it may ask.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from quire.core.errors import BadRequest
from quire.core.media import MediaConfig
from quire.images.decoding import to_rgb
from quire.text.template import IMAGE_PART

if TYPE_CHECKING:
    from PIL.Image import Image

DETAILS = (None, "auto", "low", "high", "original")
"""What OpenAI's clients may say of how large an image is to be."""
SCHEMES = ("data", "file", "http", "https")
"""Of URLs; a text that has none of them is the path of a file."""
HEAD = 128
"""Characters of a data: URL before its comma at most."""
NEEDS_PILLOW = "reading images needs Pillow, which is not installed: pip install 'quire[vision]'"
_CHUNK = 1 << 20


class Base64(NamedTuple):
    """The bytes of a file in base64, as some APIs have them without a URL."""

    text: str


@dataclass(slots=True)
class ImageSource:
    """An image as it came in the field `where`.

    `given`: a URL (data:, file:, http:, https:), `Base64`, bytes of a file, its path, a PIL image or an array. Whoever
    reads a source `take`s that out of it, so that nothing keeps it.
    """

    where: str
    given: Any

    def take(self) -> Any:
        """What was given, once."""
        given, self.given = self.given, None
        return given


def source_of(part: Mapping[str, Any], at: str) -> ImageSource | None:
    """The image that a part of a message's content is (OpenAI's shape), or None where it is none.

    `BadRequest` naming the field that is wrong.
    """
    if isinstance(part.get("source"), ImageSource):
        return part["source"]  # type: ignore[no-any-return]
    if part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    if isinstance(image, str):
        return ImageSource(f"{at}.image_url", image)
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise BadRequest(f"{at}.image_url.url: required, a string", param=f"{at}.image_url.url")
    if image.get("detail") not in DETAILS:
        raise BadRequest(f"{at}.image_url.detail: must be auto, low or high", param=f"{at}.image_url.detail")
    return ImageSource(f"{at}.image_url.url", image["url"])


def forget(part: dict[str, Any]) -> None:
    """Take the URL out of a part of a message: whoever keeps that keeps no image then."""
    image = part.get("image_url")
    if isinstance(image, dict):
        image["url"] = ""
    elif image is not None:
        part["image_url"] = ""


def scheme_of(url: str) -> str:
    """The scheme of a URL in small letters, "" where it has none."""
    head, colon, _ = url[:16].partition(":")
    return head.lower() if colon else ""


def data_of(url: str, where: str, limit: int) -> bytes:
    """The bytes of a data: URL (RFC 2397) that says it is an image in base64, at most `limit`."""
    head, comma, _ = url[5 : 5 + HEAD].partition(",")
    kind, *more = (word.strip().lower() for word in head.split(";"))
    if not comma or "base64" not in more:
        raise BadRequest(f"{where}: a data: URL must begin with data:image/...;base64,", param=where)
    if not kind.startswith("image/"):
        raise BadRequest(f"{where}: the media type {kind[:40]!r} is no image's (image/...)", param=where)
    return base64_of(url[5 + len(head) + 1 :], where, limit)


def base64_of(text: str, where: str, limit: int) -> bytes:
    """The bytes that `text` stands for; more than `limit` are refused before they are decoded."""
    if not text:
        raise BadRequest(f"{where}: has no bytes", param=where)
    if len(text) // 4 * 3 > limit + 3:
        raise too_large(where, limit)
    try:
        data = _decoded(text)
    except ValueError:
        raise BadRequest(f"{where}: is not valid base64", param=where) from None
    if len(data) > limit:
        raise too_large(where, limit)
    return data


def _decoded(text: str) -> bytes:
    """Decode base64 with or without line breaks, which looking for takes as long as decoding."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return base64.b64decode("".join(text.split()), validate=True)


def too_large(where: str, limit: int) -> BadRequest:
    """The refusal of a file of more than `limit` bytes."""
    return BadRequest(f"{where}: the file has more than {limit} bytes (--max-image-bytes)", param=where)


def file_of(url: str, where: str, media: MediaConfig) -> bytes:
    """The bytes of the file that a file:// URL names, in or below the folder that is allowed.

    Links are followed as long as they end there; the path that they come to is then opened link by link, so that none
    that is changed meanwhile leads out of it.
    """
    if media.allowed_local_media_path is None:
        raise BadRequest(f"{where}: this server reads no files (--allowed-local-media-path)", param=where)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise BadRequest(f"{where}: must be file:///PATH", param=where)
    outside = BadRequest(f"{where}: there is no such file in the allowed folder", param=where)
    try:
        root = Path(media.allowed_local_media_path).resolve(strict=True)
        inner = Path(unquote(parts.path, errors="strict")).resolve(strict=True).relative_to(root)
        return _read_below(root, inner, where, media.max_image_bytes)
    except (OSError, ValueError, RuntimeError):
        raise outside from None


def _read_below(root: Path, inner: Path, where: str, limit: int) -> bytes:
    """The bytes of a file; `OSError` where a part of its path is a link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(root, flags | os.O_DIRECTORY)
    try:
        for name in inner.parts[:-1]:
            below = os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = below
        file = os.open(inner.name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a file")
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise too_large(where, limit)
    return data


def bytes_of(path: str | os.PathLike[str], where: str, limit: int) -> bytes:
    """The bytes of a file that the caller of this process names."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise BadRequest(f"{where}: {str(path)[:200]!r}: {told}", param=where) from None
    if len(data) > limit:
        raise too_large(where, limit)
    return data


def image_of(given: Any, where: str, most: int) -> Image:
    """A PIL image, or an array uint8 [height, width], [height, width, 3 or 4], as RGB; it has `most` pixels at most.

    Its EXIF orientation is applied, as that of a file is.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise BadRequest(f"{where}: {NEEDS_PILLOW}", param=where) from None
    if isinstance(given, np.ndarray):
        shape = given.shape
        good = given.dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4)))
        if not good or 0 in shape:
            raise BadRequest(
                f"{where}: an array must be uint8 [height, width], or [height, width, 3 or 4], not {given.dtype} "
                f"{list(shape)}",
                param=where,
            )
        given = Image.fromarray(np.ascontiguousarray(given))
    if not isinstance(given, Image.Image):
        raise BadRequest(
            f"{where}: a {type(given).__name__} is no image; a PIL image, an array, a path, bytes or a data: URL is",
            param=where,
        )
    width, height = given.size
    if width * height > most or not width * height:
        raise BadRequest(
            f"{where}: {width} x {height} pixels; from 1 to {most} are read (--max-image-pixels)", param=where
        )
    try:
        return to_rgb(ImageOps.exif_transpose(given))
    except BadRequest as error:
        raise BadRequest(f"{where}: {error.message}", param=where) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise BadRequest(f"{where}: the image cannot be read: {error}", param=where) from None


def images_of(data: Any) -> list[ImageSource]:
    """The images of vLLM's `multi_modal_data`: {"image": one or a list of them}."""
    if data is None:
        return []
    at = "multi_modal_data"
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise BadRequest(f'{at}: must be {{"image": ...}}; only images are read', param=at)
    given = data.get("image")
    images = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [ImageSource(f"{at}.image[{i}]", _named(image)) for i, image in enumerate(images)]


def _named(given: Any) -> Any:
    """A text that is no URL is the path of a file."""
    return Path(given) if isinstance(given, str) and scheme_of(given) not in SCHEMES else given


def without_images(message: Any, where: str, sources: list[ImageSource]) -> Any:
    """A message without its images, which are added to `sources`; what is no message is refused by the template."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    parts = []
    for i, part in enumerate(message["content"]):
        source = _source(part, f"{where}.content[{i}]") if isinstance(part, Mapping) else None
        parts.append(part if source is None else IMAGE_PART)
        sources += [] if source is None else [source]
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], at: str) -> ImageSource | None:
    """The image of a part: an object of the caller's ({"type": "image", "image": ...}), or as OpenAI has it."""
    if part.get("type") in ("image", "image_pil"):
        given = next((part[name] for name in ("image", "image_pil", "url", "path") if part.get(name) is not None), None)
        if given is None:
            raise BadRequest(f"{at}.image: required, an image", param=f"{at}.image")
        return ImageSource(f"{at}.image", _named(given))
    return source_of(part, at)
