"""Pictures of requests: fetched or read, made ready in threads of their own, and counted while requests hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from quire.core.config import EngineConfig
from quire.core.errors import ContextTooLong, Overloaded
from quire.core.request import Request
from quire.engine.edge.async_engine import AsyncEngine
from quire.engine.pictures import Preparer
from quire.engine.requests import Encoded
from quire.engine.sources import Source, scheme_of
from quire.pictures.prompt import Prepared
from quire.server.fetching import Rules, fetch, read_hosts
from quire.server.options import ServerOptions
from quire.text.tokenizer import Tokenizer

FETCHES = 8
"""Pictures that are fetched and not prepared yet at one time: so many files are in memory at most."""
# A picture of 50 megapixels takes 400 MB while it is decoded. The engine needs the cores, and other work a thread.
_PREPARING = ThreadPoolExecutor(2, "quire-pictures")
_FETCHING = ThreadPoolExecutor(FETCHES, "quire-fetch")


class Held:
    """Bytes of the pictures of a request that the engine does not have yet."""

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
    """The pictures that a server takes. `preparing`: bytes of those of requests that are not the engine's yet."""

    def __init__(self, engine: AsyncEngine, config: EngineConfig, options: ServerOptions, tokenizer: Tokenizer) -> None:
        self._info, self._admission = engine.info, engine.admission
        self._preparer = Preparer(engine.info, config.media, tokenizer)
        self._rules = Rules(read_hosts(options.allow_media_url), config.media.max_image_bytes, options.media_timeout)
        self._most = round(options.max_images_gb * 1e9)
        self._fetches = asyncio.Semaphore(FETCHES)
        self.preparing = 0

    @property
    def mark(self) -> str:
        """What stands for a picture in a text; "" where this model takes none."""
        return self._preparer.mark

    def admit(self, sources: Sequence[Source]) -> None:
        """Refuse pictures that this model does not take, or too many, before any work."""
        self._preparer.admit(sources)

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What a request's pictures are counted by until it is the engine's."""
        held = Held(self)
        try:
            yield held
        finally:
            held.release()

    def check_room(self, count: int) -> None:
        """`Overloaded` where `count` bytes more are too many beside what requests in flight have."""
        now = self.preparing + self._admission.picture_bytes
        if now and now + count > self._most:
            raise Overloaded(
                f"pictures of requests in flight take {now / 1e9:.2g} GB, and there is no room for more "
                f"(--max-images-gb {self._most / 1e9:g})"
            )

    async def prepared(self, sources: Sequence[Source], held: Held) -> list[Prepared]:
        """The pictures of one request, one after the other, so that no request has all threads."""
        found: list[Prepared] = []
        rows = 0
        for source in sources:
            self.check_room(0)
            made = await self._prepared(source, len(sources) == 1)
            held.take(made.nbytes)
            found.append(made)
            rows += made.rows
            if rows >= self._info.max_model_len:
                raise ContextTooLong(
                    f"{source.where}: the pictures up to this one are {rows} tokens, but the context holds "
                    f"{self._info.max_model_len} and one must be left to generate",
                    param=source.where,
                )
        return found

    async def _prepared(self, source: Source, alone: bool) -> Prepared:
        loop = asyncio.get_running_loop()
        if not isinstance(source.given, str) or scheme_of(source.given) not in ("http", "https"):
            return await loop.run_in_executor(_PREPARING, self._preparer.prepare, source, alone)
        async with self._fetches:
            data = await loop.run_in_executor(_FETCHING, fetch, source.take(), source.where, self._rules)
            return await loop.run_in_executor(_PREPARING, self._preparer.prepare_file, data, source.where, alone)

    def check_marks(self, text: str, count: int, param: str) -> None:
        """Refuse a text that has not a mark for each of `count` pictures."""
        self._preparer.check_marks(text, count, param)

    def encode(self, text: str, prepared: Sequence[Prepared], param: str | None, special: bool = False) -> Encoded:
        """Token ids of a text with a mark for each picture; in a thread. `special`: with what stands around texts."""
        return self._preparer.encode(text, prepared, param, special)

    def shown(self, request: Request) -> Sequence[int]:
        """The ids of a prompt as replies have them."""
        if not request.pictures:
            return request.prompt
        return self._preparer.shown(request.prompt, request.pictures)

    def shown_of(self, encoded: Encoded) -> list[int]:
        """The same of one that no engine has."""
        if not encoded.pictures:
            return list(encoded.ids)
        return self._preparer.shown(encoded.ids, encoded.pictures)
