"""What must be kept of a request so that another engine can go on with it bit for bit: itself and what came of it."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from quire.core.request import Output, Request, Timing
from quire.engine.client import AdapterChanged

logger = logging.getLogger("quire.engine")


class UnfinishedRequest:
    """A request whose seed is set, the tokens of each of its sequences (None once it ended), and deaths it was in.

    `since`: restarts of engines before it was submitted.
    `name`: what the engine calls it. Each attempt has another, so that nothing that an earlier one still says counts.
    `deaths`: engines that died one after the other while no token came of it; `alone`: it is being tried alone;
    `paused`: no engine has it until somebody reads what came.
    """

    def __init__(self, request: Request, since: int = 0) -> None:
        self.request, self.name, self.since = request, request.id, since
        self.emitted: list[list[int] | None] = [[] for _ in range(request.params.n)]
        self.deaths = 0
        self.alone = self.paused = False
        self._marked = self._attempts = 0
        self._began: list[Timing | None] = [None] * request.params.n
        self._preemptions = [0] * request.params.n
        self._cached: list[int | None] = [None] * request.params.n
        self._earlier = [0] * request.params.n

    @property
    def live(self) -> bool:
        """Whether any sequence goes on."""
        return any(emitted is not None for emitted in self.emitted)

    @property
    def started(self) -> bool:
        """Whether anything came."""
        return any(emitted is None or emitted for emitted in self.emitted)

    @property
    def gained(self) -> int:
        """Tokens of each sequence that goes on, at least, since `mark`."""
        return min((len(emitted) for emitted in self.emitted if emitted is not None), default=0) - self._marked

    def mark(self) -> None:
        """Count `gained` from here."""
        self._marked += self.gained

    def died(self) -> None:
        """An engine died that may have been computing it."""
        self.deaths = 1 if self.gained else self.deaths + 1
        self.alone = False
        self.mark()

    def replay_request(self) -> Request:
        """The request as an engine is to run it: behind what came."""
        self._attempts += 1
        self._earlier = list(self._preemptions)
        if self._attempts > 1:
            self.name = f"{self.request.id}~{self._attempts}"
        if not self.started:
            return replace(self.request, id=self.name)
        params = self.request.params
        if params.prompt_logprobs is not None and self.emitted[0] != []:
            params = replace(params, prompt_logprobs=None)  # they came with its first token
        emitted = tuple(None if each is None else tuple(each) for each in self.emitted)
        return replace(self.request, id=self.name, params=params, emitted=emitted)

    def drop(self, index: int) -> None:
        """Nobody wants more of one sequence: it counts as ended."""
        self.emitted[index] = None

    def condemned(self) -> list[Output]:
        """Answer a request that ended an engine all by itself: an error for each sequence that goes on."""
        logger.error("request %s ended the engine when it ran alone; it gets an error", self.request.id)
        error = "the engine died of this request, also when it ran alone"
        live = [index for index, emitted in enumerate(self.emitted) if emitted is not None]
        return [Output(request_id=self.request.id, index=i, finish_reason="error", error=error) for i in live]

    def take(self, output: Output) -> None:
        """Note what an engine put out, under the name that the client knows, with the times that it cannot know."""
        output.request_id = self.request.id
        emitted = self.emitted[output.index]
        if emitted is None:
            return
        emitted += output.tokens
        cached = self._cached[output.index]  # an engine that goes on finds what others computed
        if cached is not None:
            output.cached_tokens = cached
        elif output.tokens:
            self._cached[output.index] = output.cached_tokens
        output.preemptions += self._earlier[output.index]
        self._preemptions[output.index] = output.preemptions
        if output.timing is not None:
            began = self._began[output.index] = self._began[output.index] or output.timing
            last = max(output.timing.last_token, began.last_token)
            output.timing = replace(began, last_token=last) if began.first_token else output.timing
        if output.finish_reason is not None:
            self.emitted[output.index] = None


class LoadedAdapters:
    """Adapters that the next engine is to load, by name: those that are loaded, and changes that are under way."""

    def __init__(self) -> None:
        self._loaded: dict[str, str] = {}
        self._changing: dict[str, str] = {}

    @property
    def changing(self) -> bool:
        """Whether a change is under way."""
        return bool(self._changing)

    def ask(self, name: str, folder: str) -> None:
        """Somebody wants this change."""
        self._changing[name] = folder

    def all(self) -> dict[str, str]:
        """What to tell an engine that has just been started."""
        return self._loaded | self._changing

    def settle(self, change: AdapterChanged) -> bool:
        """Note what is loaded; whether anybody asked for it: a new engine is told to load what the last one had."""
        folder = self._changing.pop(change.name, None)
        if folder is None:
            if change.error:
                logger.error("adapter %s is lost: %s", change.name, change.error)
            return False
        if not change.error:
            self._loaded.pop(change.name, None)
            self._loaded |= {change.name: folder} if folder else {}
        return True
