"""Images made ready for a model, and prompts that have them: what `LLM` and the server do alike."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest
from quire.core.images import PromptImage
from quire.core.media import MediaConfig
from quire.engine.client import EngineInfo
from quire.engine.requests import EncodedPrompt, check_size
from quire.features.images.edge_image_sources import (
    NEEDS_PILLOW,
    Base64,
    ImageSource,
    base64_of,
    bytes_of,
    data_of,
    file_of,
    image_of,
    scheme_of,
    too_large,
)
from quire.gguf.file import GgufFile
from quire.gguf.mmproj import Mmproj
from quire.images.decoding import DecodeLimits, read_image
from quire.images.processor_config import Settings
from quire.images.prompt import ImagePrompts, PreparedImage, open_image_prompts
from quire.model.disk.hf_config import read_json
from quire.model.families.text_parts import text_part
from quire.model.vision.mmproj import settings_of
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

TAKES_NONE = "this model takes no images"

Key = tuple[bytes, bool]
"""Digest of a file, and whether its image is alone in its prompt."""


class Preparer:
    """Reads images and makes them as the model wants them; any thread may call.

    The last ones are kept by a digest of their files: one that comes again is not decoded again, and of one that comes
    twice at a time the second waits for the first. `BadRequest` names the field that an image came in.
    """

    def __init__(self, info: EngineInfo, media: MediaConfig, tokenizer: Tokenizer) -> None:
        self.media = media
        self._info, self._tokenizer = info, tokenizer
        self._limits = DecodeLimits(bytes=media.max_image_bytes, pixels=media.max_image_pixels)
        self._kept: OrderedDict[Key, PreparedImage] = OrderedDict()
        self._room = round(media.mm_processor_cache_gb * 1e9)
        self._making: dict[Key, Future[PreparedImage]] = {}
        self._lock = threading.Lock()
        able = info.takes_images and find_spec("PIL") is not None
        self._image_prompts = open_image_prompts(info.folder, tokenizer, _settings(info)) if able else None
        self.refused = _refused(info, self._image_prompts)
        self.hits = 0
        """Images that were not prepared, as they had been before."""

    @property
    def image_prompts(self) -> ImagePrompts:
        """What the model makes of images; `BadRequest` where it takes none here."""
        if self._image_prompts is None:
            raise BadRequest(self.refused)
        return self._image_prompts

    @property
    def mark(self) -> str:
        """What stands for an image in the text of a prompt; "" where there may be none."""
        return "" if self._image_prompts is None else self._image_prompts.image_token

    def admit(self, sources: Sequence[ImageSource]) -> None:
        """Refuse images that this model does not take, and more than a prompt may have, before any is read."""
        if sources and self.refused:
            raise BadRequest(f"{sources[0].where}: {self.refused}", param=sources[0].where)
        most = self.media.max_images
        if len(sources) > most:
            where = sources[most].where
            told = f"{where}: {len(sources)} images are more than the {most} of a prompt (--limit-mm-per-prompt)"
            raise BadRequest(told, param=where)

    def prepare(self, source: ImageSource, alone: bool) -> PreparedImage:
        """Read an image that is here already, or in a file, and make it ready. `alone`: its prompt has no other."""
        given, where = source.take(), source.where
        if isinstance(given, (str, Base64, bytes, bytearray, memoryview, os.PathLike)):
            return self.prepare_file(self._read(given, where), where, alone)
        return self._made(image_of(given, where, self.media.max_image_pixels), where, alone)

    def prepare_file(self, data: bytes, where: str, alone: bool) -> PreparedImage:
        """Prepare an image from the bytes of a file."""
        key = hashlib.blake2b(data, digest_size=32).digest(), alone
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return kept
            made, mine = self._making.get(key), Future[PreparedImage]()
            if made is None:
                self._making[key] = mine
        if made is not None:
            return self._shared(made, data, where, alone)
        try:
            found = self._decoded(data, where, alone)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._making[key]
        mine.set_result(found)
        self._keep(key, found)
        return found

    def _shared(self, made: Future[PreparedImage], data: bytes, where: str, alone: bool) -> PreparedImage:
        """What another thread makes of the same file; its refusal names its own field, so that is done again."""
        try:
            return made.result()
        except Exception:
            return self._decoded(data, where, alone)

    def _decoded(self, data: bytes, where: str, alone: bool) -> PreparedImage:
        with _named(where):
            pil_image = read_image(data, self._limits)
        return self._made(pil_image, where, alone)

    def _made(self, pil_image: Image, where: str, alone: bool) -> PreparedImage:
        with _named(where):
            made = self.image_prompts.prepare(pil_image, alone)
        for part in made.parts:  # where rows see each other, those of a part are one run
            self._info.image_limits.check(part.size, part.rows, part.rows, where)
        return made

    def _read(self, given: Any, where: str) -> bytes:
        limit = self.media.max_image_bytes
        if isinstance(given, Base64):
            return base64_of(given.text, where, limit)
        if isinstance(given, (bytes, bytearray, memoryview)):
            if len(given) > limit:
                raise too_large(where, limit)
            return bytes(given)
        if not isinstance(given, str):
            return bytes_of(given, where, limit)
        scheme = scheme_of(given)
        if scheme == "data":
            return data_of(given, where, limit)
        if scheme == "file":
            return file_of(given, where, self.media)
        if scheme in ("http", "https"):
            raise BadRequest(
                f"{where}: nothing is fetched here: give a PIL image, an array, a path, the bytes of a file or a data: "
                "URL; a server fetches from the hosts of --allow-media-url",
                param=where,
            )
        raise BadRequest(f"{where}: must be a data:, file:, http: or https: URL", param=where)

    def _keep(self, key: Key, found: PreparedImage) -> None:
        """Keep an image in the place of those that nobody sent for the longest time."""
        with self._lock:
            if key in self._kept:
                return
            self._room -= found.nbytes
            self._kept[key] = found
            while self._room < 0:
                _, oldest = self._kept.popitem(last=False)
                self._room += oldest.nbytes

    def check_marks(self, text: str, count: int, param: str) -> None:
        """Refuse a text, which came in the field `param`, that has not a mark for each of `count` images."""
        marks = text.count(self.mark)
        if marks != count:
            raise BadRequest(
                f"{param}: {count} images came, and the prompt has a place ({self.mark}) for {marks}; a model may "
                "take none in some messages, as the system's or the assistant's",
                param=param,
            )

    def encode(
        self, text: str, prepared: Sequence[PreparedImage], param: str | None, special: bool = False
    ) -> EncodedPrompt:
        """Token ids of a text with a mark for each image. `param`: the field it came in, None = it may be too long.

        `special`: with what the tokenizer puts around texts.
        """
        full = self.image_prompts.expand(text, prepared)
        if param is not None:
            check_size(self._info, self._tokenizer, full, param)
        return self.place(self._tokenizer.encode(full, special), prepared, param or "messages")

    def place(self, ids: Sequence[int], prepared: Sequence[PreparedImage], param: str) -> EncodedPrompt:
        """Place images in ids, in which an image token stands for each row of an image."""
        with _named(param):
            found, images = self.image_prompts.place(ids, prepared, self._info.vocab_size)
        return EncodedPrompt(found, images)

    def shown(self, ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
        """The ids of a prompt as replies have them: rows of images are image tokens, which vocabularies know."""
        found = list(ids)
        for start, count in (run for image in images for run in image.runs):
            found[start : start + count] = [self.image_prompts.row_id] * count
        return found


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Refusals name the field."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(f"{where}: {error.message}", param=where) from None


def _told(folder: str) -> str:
    """What the folder's config.json has of parts that are not run, in words."""
    path = Path(folder) / "config.json"
    part = text_part(read_json(path)) if path.is_file() else None
    return "" if part is None else part.told


def _settings(info: EngineInfo) -> Settings | None:
    """What the mmproj file of a GGUF model says of images."""
    if not info.mmproj:
        return None
    return settings_of(Mmproj.open(Path(info.mmproj)), GgufFile(Path(info.folder)))


def _refused(info: EngineInfo, prompts: ImagePrompts | None) -> str:
    """Why images are not taken, "" where they are."""
    if not info.takes_images:
        return ": ".join(filter(None, (TAKES_NONE, _told(info.folder))))
    if find_spec("PIL") is None:
        return NEEDS_PILLOW
    if prompts is None:
        return f"{TAKES_NONE}: its folder does not say how they are to be cut (preprocessor_config.json)"
    return ""
