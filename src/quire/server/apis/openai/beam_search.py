"""Beam search for clients: its fields, and the answers of `engine.beam` as choices that come all at one time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.request import Miss, Output, Request, random_id
from quire.engine.beam import MAX_BEAMS, Beam, BeamSearchParams, Tails, searching
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.frontend.request_times import Moments, Timings, moments, timings
from quire.engine.frontend.streams import OutputStream
from quire.engine.requests import room
from quire.server.apis.openai.protocol import SamplingFields
from quire.server.text_generation.generation import Piece
from quire.server.text_generation.reports import CacheReport, Usage, details
from quire.text.detokenizer import continuation
from quire.text.structured.answer_checks import NO_CHECKS
from quire.text.tokenizer import Tokenizer


class Beams:
    """A `Generated` of the best beams of each prompt, best first. `requests`: the prompts, as they were asked for.

    Beams are requests of one token, which find their common beginnings in the prefix cache.
    """

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, requests: Sequence[Request], params: BeamSearchParams
    ) -> None:
        self.requests, self.checks = requests, NO_CHECKS
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._stream: OutputStream | None = None
        self._cached = dict.fromkeys((r.id for r in requests), 0)
        self._made = 0
        self._drawn = dict.fromkeys(self._cached, 0)
        self._reasons: list[str | None] = [None] * self.count
        self._one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False)

    @property
    def count(self) -> int:
        """Choices in all."""
        return len(self.requests) * self._params.beam_width

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """All choices, once."""
        prompts = [request.prompt for request in self.requests]
        limits = [room(self._engine.info, len(prompt)) for prompt in prompts]
        going = searching(prompts, limits, self._params, self._engine.info.eos_token_ids)
        found: list[list[Beam]] = []
        rows: list[tuple[int, ...]] | None = next(going, None)
        while rows is not None:
            tails, rows = await self._step(rows), None
            try:
                rows = going.send(tails)
            except StopIteration as end:
                found = end.value
        yield [
            self._piece(i * self._params.beam_width + j, prompts[i], b)
            for i, beams in enumerate(found)
            for j, b in enumerate(beams)
        ]

    def _piece(self, choice: int, prompt: Sequence[int], beam: Beam) -> Piece:
        reason = self._reasons[choice] = "stop" if beam.ended else "length"
        self._made += len(beam.tokens)
        text = continuation(self._tokenizer, prompt, beam.tokens[:-1] if beam.ended else beam.tokens)
        return Piece(choice, text, list(beam.tokens), [], None, reason)

    async def _step(self, rows: list[tuple[int, ...]]) -> Tails:
        """What may follow each of `rows`."""
        owners = {request.prompt: request for request in self.requests}
        children = [replace(self._owner(row, owners), id=random_id(), prompt=row, params=self._one) for row in rows]
        found: dict[str, Output] = {}
        self._stream = self._engine.submit(children)
        try:
            while outputs := await self._stream.next():
                found |= {output.request_id: output for output in outputs}
        finally:
            self._stream.close()
        for child in children:
            self._drawn[self._owner(child.prompt, owners).id] += 1
            owner = owners.get(child.prompt)
            if owner is not None:
                self._cached[owner.id] = found[child.id].cached_tokens
        return [[(token, value) for token, value in found[child.id].logprobs[0].top] for child in children]

    @staticmethod
    def _owner(row: tuple[int, ...], owners: dict[tuple[int, ...], Request]) -> Request:
        """Whose beam a row is: of the prompts that it begins with, the longest serves as well as any."""
        return max((o for p, o in owners.items() if row[: len(p)] == p), key=lambda o: len(o.prompt))

    def usage(self, choice: int | None = None) -> Usage:
        """Tokens of the prompts, and of the beams that are answers."""
        read = sum(len(request.prompt) for request in self.requests)
        cached = details(sum(self._cached.values()), self.requests)
        return Usage(prompt_tokens=read, completion_tokens=self._made, total_tokens=read + self._made,
                     prompt_tokens_details=cached)  # fmt: skip

    def timings(self, request: Request | None = None) -> Timings:
        """Tokens alone are known of the whole: its steps are requests of their own."""
        asked = (request,) if request else self.requests
        found = timings((), sum(len(each.prompt) for each in asked))
        return replace(found, generated_tokens=sum(self._drawn[each.id] for each in asked))

    def moments(self, request: Request, received: float, told: float) -> Moments:
        """Times of the whole search: only its ends are known."""
        return moments((), received, told)

    def cache(self, request: Request) -> CacheReport:
        """What the prefix cache had of a prompt when the search began."""
        hit, prompt = self._cached[request.id], len(request.prompt)
        miss = Miss(hit, "not_cached") if hit < prompt - 1 else None
        return CacheReport(prompt_tokens=prompt, hit_tokens=hit, first_miss=miss)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Why each choice ended, if it did."""
        return self._reasons

    def finish_reasons_of(self, request: Request) -> list[str | None]:
        """Reasons why one prompt's choices ended."""
        at = self._params.beam_width * [each.id for each in self.requests].index(request.id)
        return self._reasons[at : at + self._params.beam_width]

    def text(self, choice: int) -> str:
        """Nothing is checked of beams: no grammar is in force."""
        return ""

    def close(self) -> None:
        """Abort the step under way; idempotent."""
        if self._stream is not None:
            self._stream.close()


_OWN = ("length_penalty", "early_stopping")
_BESIDE = (
    "stream", "logprobs", "prompt_logprobs", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words",
    "min_tokens", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "grammar", "json_schema", "tools", "echo",
)  # fmt: skip
_OFF: tuple[object, ...] = (0, 0.0, [], {})
_WHOLE = ("top_p", "repetition_penalty")


def check_beams(body: SamplingFields) -> None:
    """`BadRequest` for what beam search cannot be asked for with, and for its fields without it."""
    if not body.use_beam_search:
        for name in _OWN:
            value = getattr(body, name)
            if value is not None and value is not False and (value is True or value != 1.0):
                raise BadRequest(f"{name}: has no effect without use_beam_search", param=name)
        return
    if not 1 <= (body.n or 1) <= MAX_BEAMS:
        raise BadRequest(f"n: is the number of beams, which must lie in [1, {MAX_BEAMS}]", param="n")
    if isinstance(body.early_stopping, str) and body.early_stopping != "never":
        raise BadRequest("early_stopping: must be true, false or never", param="early_stopping")
    for name in _BESIDE:
        value = getattr(body, name, None)
        plain = value is None or value is False or (name != "logprobs" and value is not True and value in _OFF)
        plain = plain or (name in _WHOLE and value == 1.0)
        if not plain:
            raise BadRequest(
                f"{name}: has no effect with use_beam_search, or cannot be had of it; leave it out", param=name
            )


def beam_params(body: SamplingFields, max_tokens: int) -> BeamSearchParams:
    """What `body` asks of a search of at most `max_tokens` tokens; `BadRequest` naming a field that is out of range."""
    asked = BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        ignore_eos=bool(body.ignore_eos),
        early_stopping=body.early_stopping is True,
    )
    asked.validate()
    return asked
