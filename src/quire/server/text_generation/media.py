"""Images of requests: fetched or read, made ready in threads of their own, and counted while requests hold them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from quire.core.config import EngineConfig
from quire.core.errors import Overloaded
from quire.core.request import Request, longest_prompt
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.requests import EncodedPrompt, too_long
from quire.features.images.edge_image_preparation import Preparer
from quire.features.images.edge_image_sources import ImageSource, scheme_of
from quire.images.prompt import PreparedImage
from quire.server.server_options import ServerOptions
from quire.server.text_generation.fetching import FetchCancellation, Rules, fetch, read_hosts
from quire.text.tokenizer import Tokenizer

FETCHES = 16
"""Images that are fetched and not prepared yet at one time: so many files are in memory at most."""
AT_ONCE = 8
"""Those of one request, so that none keeps others from fetching."""
# An image of 50 megapixels takes 400 MB while it is decoded. The engine needs the cores, and other work a thread.
_PREPARING = ThreadPoolExecutor(2, "quire-images")
_FETCHING = ThreadPoolExecutor(FETCHES, "quire-fetch")


class ImageBytes:
    """Bytes of the images of a request that the engine does not have yet."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._bytes = 0

    def take(self, count: int) -> None:
        """Hold so many more. `Overloaded` where all requests would have too many; one alone may have any number."""
        self._media.check_room(count)
        self._bytes += count
        self._media.preparing += count

    def release(self) -> None:
        """Hold none."""
        self._media.preparing -= self._bytes
        self._bytes = 0


class Media:
    """The images that a server takes. `preparing`: bytes of those of requests that are not the engine's yet."""

    def __init__(self, engine: AsyncEngine, config: EngineConfig, options: ServerOptions, tokenizer: Tokenizer) -> None:
        self._info, self._admission = engine.info, engine.admission
        self._preparer = Preparer(engine.info, config.media, tokenizer)
        self._rules = Rules(read_hosts(options.allow_media_url), config.media.max_image_bytes, options.media_timeout)
        self._most = round(options.max_images_gb * 1e9)
        self._fetches = asyncio.Semaphore(FETCHES)
        self.preparing = 0

    @property
    def mark(self) -> str:
        """What stands for an image in a text; "" where this model takes none."""
        return self._preparer.mark

    def admit(self, sources: Sequence[ImageSource]) -> None:
        """Refuse images that this model does not take, or too many, before any work."""
        self._preparer.admit(sources)

    @contextlib.contextmanager
    def hold(self) -> Iterator[ImageBytes]:
        """What a request's images are counted by until it is the engine's."""
        held = ImageBytes(self)
        try:
            yield held
        finally:
            held.release()

    def check_room(self, count: int) -> None:
        """`Overloaded` where `count` bytes more are too many beside what requests in flight have."""
        now = self.preparing + self._admission.image_bytes
        if now and now + count > self._most:
            raise Overloaded(
                f"images of requests in flight take {now / 1e9:.2g} GB, and there is no room for more "
                f"(--max-images-gb {self._most / 1e9:g})"
            )

    async def prepared(self, sources: Sequence[ImageSource], held: ImageBytes) -> list[PreparedImage]:
        """The images of one request: fetched at once, and made ready one after the other, so that no request has all
        threads. The first that is refused ends what others are fetched for."""
        found: list[PreparedImage] = []
        before: asyncio.Task[None] | None = None
        turns = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    made = self._add(found, source, len(sources) == 1, (turns, before), held)
                    before = group.create_task(made)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found

    async def _add(
        self,
        found: list[PreparedImage],
        source: ImageSource,
        alone: bool,
        order: tuple[asyncio.Semaphore, asyncio.Task[None] | None],
        held: ImageBytes,
    ) -> None:
        """Add an image to those `found`, once the one before it was. `order`: turns of fetching, which come in the
        order of images, so that none that has one waits for one that has none, and who adds the one before."""
        turns, before = order
        async with contextlib.AsyncExitStack() as stack:
            prepare = partial(self._preparer.prepare, source)
            if isinstance(source.given, str) and scheme_of(source.given) in ("http", "https"):
                await stack.enter_async_context(turns)
                await stack.enter_async_context(self._fetches)
                self.check_room(0)
                prepare = partial(self._preparer.prepare_file, await self._fetched(source), source.where)
            if before is not None:
                await asyncio.wait([before])
            self.check_room(0)
            made = await asyncio.get_running_loop().run_in_executor(_PREPARING, prepare, alone)
        held.take(made.nbytes)
        found.append(made)
        self._check_rows(found, source.where)

    async def _fetched(self, source: ImageSource) -> bytes:
        """The file behind a URL; the connection ends where nobody waits for it any more."""
        wanted, url = FetchCancellation(), source.take()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_FETCHING, fetch, url, source.where, self._rules, wanted)
        except asyncio.CancelledError:
            wanted.end()
            raise

    def _check_rows(self, found: Sequence[PreparedImage], where: str) -> None:
        rows = sum(made.rows for made in found)
        if rows > longest_prompt(self._info.max_model_len):
            raise too_long(where, f"the images up to this one are {rows} tokens", self._info.max_model_len)

    def check_marks(self, text: str, count: int, param: str) -> None:
        """Refuse a text that has not a mark for each of `count` images."""
        self._preparer.check_marks(text, count, param)

    def encode(
        self, text: str, prepared: Sequence[PreparedImage], param: str | None, special: bool = False
    ) -> EncodedPrompt:
        """Token ids of a text with a mark for each image; in a thread. `special`: with what stands around texts."""
        return self._preparer.encode(text, prepared, param, special)

    def shown(self, request: Request) -> Sequence[int]:
        """The ids of a prompt as replies have them."""
        if not request.images:
            return request.prompt
        return self._preparer.shown(request.prompt, request.images)

    def shown_of(self, encoded: EncodedPrompt) -> list[int]:
        """Describe an image that no engine has."""
        if not encoded.images:
            return list(encoded.ids)
        return self._preparer.shown(encoded.ids, encoded.images)
