"""Options of images and audio: how many there may be, how large, and from where files are read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.core.errors import ConfigError
from quire.core.options.fields import about

USUAL_IMAGES = 16


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image may be, and how many of them a prompt may have. `limit_mm_per_prompt` is spelled as vLLM's."""

    limit_mm_per_prompt: Annotated[
        str | None,
        about(f'Images of one prompt at most: image=4, or {{"image": 4}}; {USUAL_IMAGES} if not given.'),
    ] = None
    max_image_bytes: Annotated[int, about("Largest file of an image, in bytes.", ge=1024)] = 20 << 20
    max_image_pixels: Annotated[
        int, about("Most pixels of an image, before it is made smaller for the model.", ge=1)
    ] = 50_000_000
    max_audio_seconds: Annotated[
        float, about("Longest audio of a request, in seconds; all that are in flight have four times as many.", gt=0)
    ] = 7200.0
    mm_processor_cache_gb: Annotated[
        float,
        about(
            "GB (1e9 bytes) of images that are kept as the model wants them, in case they come again.",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.25
    allowed_local_media_path: Annotated[
        str | None, about("Folder of images that messages may name by file:// URLs; none may without it.")
    ] = None

    def validate(self) -> None:
        """Refuse what cannot work, naming the option."""
        _ = self.max_images

    @property
    def max_images(self) -> int:
        """Images of one prompt at most; `ConfigError` where `limit_mm_per_prompt` does not say it."""
        if self.limit_mm_per_prompt is None:
            return USUAL_IMAGES
        counts = _counts(self.limit_mm_per_prompt)
        for name, count in counts.items():
            if type(count) is not int or not 0 <= count <= 1 << 16:
                raise _limit_error(f"{name!r} must have a number from 0 to 65536")
            if name != "image" and count:
                raise _limit_error(f"only images are read, no {name[:40]!r}; leave it out, or say 0")
        return int(counts.get("image", USUAL_IMAGES))


def _counts(text: str) -> dict[str, Any]:
    """Parse counts by kind of media: JSON, or name=number, several of them with commas between."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _limit_error(str(error)) from None
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    return {name: int(value) if value.isdecimal() and len(value) < 10 else value for name, _, value in pairs}


def _limit_error(told: str) -> ConfigError:
    return ConfigError(f'--limit-mm-per-prompt: {told}; as in image=4 or {{"image": 4}}', param="limit_mm_per_prompt")
