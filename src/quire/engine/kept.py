"""What must be kept of a request so that another engine can go on with it bit for bit: itself and what came of it."""

from __future__ import annotations

from msgspec.structs import replace

from quire.core.request import Output, Request, Timing


class Kept:
    """A request whose seed is set, the tokens of each of its sequences (None once it ended), and deaths it was in.

    `since`: restarts of engines before it was submitted.
    `name`: what the engine calls it. Each attempt has another, so that nothing that an earlier one still says counts.
    `deaths`: engines that died one after the other while no token came of it; `alone`: it is being tried alone.
    """

    def __init__(self, request: Request, since: int = 0) -> None:
        self.request, self.name, self.since = request, request.id, since
        self.told: list[list[int] | None] = [[] for _ in range(request.params.n)]
        self.deaths = 0
        self.alone = False
        self._marked = self._attempts = 0
        self._began: list[Timing | None] = [None] * request.params.n
        self._preemptions = [0] * request.params.n
        self._earlier = [0] * request.params.n

    @property
    def live(self) -> bool:
        """Whether any sequence goes on."""
        return any(told is not None for told in self.told)

    @property
    def started(self) -> bool:
        """Whether anything came."""
        return any(told is None or told for told in self.told)

    @property
    def gained(self) -> int:
        """Tokens of each sequence that goes on, at least, since `mark`."""
        return min((len(told) for told in self.told if told is not None), default=0) - self._marked

    def mark(self) -> None:
        """Count `gained` from here."""
        self._marked += self.gained

    def died(self) -> None:
        """An engine died that may have been computing it."""
        self.deaths = 1 if self.gained else self.deaths + 1
        self.alone = False
        self.mark()

    def again(self) -> Request:
        """The request as an engine is to run it: behind what came."""
        self._attempts += 1
        self._earlier = list(self._preemptions)
        if self._attempts > 1:
            self.name = f"{self.request.id}~{self._attempts}"
        if not self.started:
            return replace(self.request, id=self.name)
        params = self.request.params
        if params.prompt_logprobs is not None and self.told[0] != []:
            params = replace(params, prompt_logprobs=None)  # they came with its first token
        told = tuple(None if each is None else tuple(each) for each in self.told)
        return replace(self.request, id=self.name, params=params, told=told)

    def drop(self, index: int) -> None:
        """Nobody wants more of one sequence: it counts as ended."""
        self.told[index] = None

    def failed(self, error: str) -> list[Output]:
        """An error for each sequence that goes on."""
        live = [index for index, told in enumerate(self.told) if told is not None]
        return [Output(request_id=self.request.id, index=i, finish_reason="error", error=error) for i in live]

    def take(self, output: Output) -> None:
        """Note what an engine put out, under the name that the client knows, with the times that it cannot know."""
        output.request_id = self.request.id
        told = self.told[output.index]
        if told is None:
            return
        told += output.tokens
        output.preemptions += self._earlier[output.index]
        self._preemptions[output.index] = output.preemptions
        if output.timing is not None:
            began = self._began[output.index] = self._began[output.index] or output.timing
            last = max(output.timing.last_token, began.last_token)
            output.timing = replace(began, last_token=last) if began.first_token else output.timing
        if output.finish_reason is not None:
            self.told[output.index] = None
