"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.request import Request as EngineRequest
from quire.core.request import TokenLogprob
from quire.engine.requests import EncodedPrompt, check_size, continued
from quire.features.images.edge_image_sources import ImageSource
from quire.server.apis.answer import respond
from quire.server.apis.openai.choices import Choices, ChoicesAnswer, State
from quire.server.apis.openai.prompts import Prompts, cut, encode_prompts, encode_with_images, listed
from quire.server.apis.openai.protocol import CompletionRequest
from quire.server.apis.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from quire.server.apis.openai.sampling_params import (
    COMPLETION_MAX_TOKENS,
    beams_of,
    build_requests,
    drawn,
    read_body,
    sampling_params,
    token_limit,
)
from quire.server.apis.openai.structured_output import OutputShape, shape_of
from quire.server.http.body import ID_BYTES, in_turns, off_loop
from quire.server.http.routes import SSE, Route
from quire.server.keys import Tenant
from quire.server.service import Service
from quire.server.text_generation.generation import Generated, Generation, Piece
from quire.server.text_generation.media import ImageBytes
from quire.server.text_generation.reports import Usage
from quire.text.detokenizer import Offsets, detokenizer, prompt_text
from quire.text.infill import ends_of, format_of, infill
from quire.text.structured.answer_checks import checks_of


async def create_completion(service: Service, request: Request) -> Response:
    """Continue one or several prompts. Return the output whole or as a stream of events."""
    arrival = time.monotonic()
    body = await read_body(service, request, CompletionRequest, built=frozenset({"echo"}))
    generation = await submit_completion(service, body, arrival, request.state.tenant)
    return await respond(request, _Answer(service, body, generation))


async def submit_completion(
    service: Service,
    body: CompletionRequest,
    arrival: float,
    tenant: Tenant,
    *,
    each: bool = False,
    most: int | None = COMPLETION_MAX_TOKENS,
    sources: Sequence[ImageSource] = (),
) -> Generated:
    """Start the continuations that `body` asks for. `BadRequest` naming its field.

    `each`: a piece for each token. `most`: tokens where `body` says no number, None = as many as there is room for.
    `sources`: images, whose marks are in the one prompt that there is then.
    """
    given = await off_loop(ID_BYTES * len(body.prompt), listed, service, body.prompt)
    service.media.admit(sources)
    queued = service.engine.reserve(len(given) * drawn(body), tenant.called(body.user), tenant.max_sequences)
    with queued, service.media.hold() as held:
        prompts, ends = await _prompts(service, body, given, sources, held)
        shape = shape_of(body)
        asked = OutputShape(shape, checks=checks_of(shape))
        requests = await _requests(service, body, prompts, ends, arrival, tenant, most, asked)
    if body.use_beam_search:
        return beams_of(service, body, requests)
    return Generation(service.engine, service.tokenizer, requests, each, checks=asked.checks)


async def _requests(
    service: Service,
    body: CompletionRequest,
    prompts: list[EncodedPrompt],
    ends: tuple[int, ...],
    arrival: float,
    tenant: Tenant,
    most: int | None,
    shape: OutputShape,
) -> list[EngineRequest]:
    info = service.engine.info
    echo_only = bool(body.echo) and body.max_tokens == 0
    params = []
    async for i, prompt in in_turns(enumerate(prompts)):
        prompts[i] = prompt = cut(prompt, body.truncate_prompt_tokens, info.max_model_len)
        asked = 1 if echo_only else body.max_tokens
        max_tokens = token_limit(info, len(prompt.ids), "prompt", asked, "max_tokens", most)
        param = sampling_params(
            body, service.defaults, shape, max_tokens=max_tokens, logprobs=body.logprobs, vocab_size=info.vocab_size
        )
        if ends:
            param = msgspec.structs.replace(param, stop_token_ids=(*param.stop_token_ids, *ends))
        if body.echo and body.logprobs is not None:
            wanted = max(body.logprobs, body.prompt_logprobs or 0)
            param = msgspec.structs.replace(param, prompt_logprobs=wanted)
        params.append(param)
    return await build_requests(service, body, prompts, params, arrival, tenant, shape, shown=drawn(body))


async def _prompts(
    service: Service, body: CompletionRequest, given: Prompts, sources: Sequence[ImageSource], held: ImageBytes
) -> tuple[list[EncodedPrompt], tuple[int, ...]]:
    """Token ids of the prompts, with what comes behind the gap if that is given; tokens that end what fills it."""
    special, field = body.add_special_tokens is not False, "prompt" if body.truncate_prompt_tokens is None else None
    if sources:
        [text] = given
        return [await encode_with_images(service, str(text), sources, held, field, special)], ()
    if not body.suffix:
        return [EncodedPrompt(ids) for ids in await encode_prompts(service, given, special, field)], ()
    found = format_of(service.tokenizer)
    if found is None:
        raise BadRequest(
            "suffix: this model's vocabulary has no tokens for filling in the middle; send a prompt alone",
            param="suffix",
        )
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise BadRequest(f"{name}: cannot be had with suffix; leave one out", param=name)
    check_size(service.engine.info, service.tokenizer, body.suffix, "suffix")
    for text in given:
        if isinstance(text, str):
            check_size(service.engine.info, service.tokenizer, text)
    size = service.tokenizer.work(sum(map(len, given)) + len(given) * len(body.suffix))
    prompts = [
        EncodedPrompt(await off_loop(size, infill, service.tokenizer, found, text, body.suffix)) for text in given
    ]
    return prompts, ends_of(service.tokenizer, found)


class _Answer(ChoicesAnswer[CompletionRequest]):
    """The shapes of completions. The first chunk of a choice carries the echoed prompt."""

    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, generation: Generated) -> None:
        super().__init__(service, body, generation, scored=body.logprobs is not None)
        self._echo_only = bool(body.echo) and body.max_tokens == 0

    def opens(self, state: State) -> bool:
        """The echoed prompt need not wait for text."""
        return bool(self.body.echo) and not state.begun

    def take(self, pieces: list[Piece]) -> None:
        """Where only the prompt is wanted, the token that the engine must generate is dropped."""
        super().take(pieces)
        for piece in pieces if self._echo_only else ():
            piece.text, piece.tokens, piece.logprobs = "", [], []
            if piece.finish_reason is not None:
                piece.finish_reason, piece.stop_reason = "length", None

    def usage(self) -> Usage:
        """Usage without that token."""
        usage = super().usage()
        if self._echo_only:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return usage

    def part(self, state: State, piece: Piece) -> CompletionChoice:
        """A piece of a continuation, or all of it."""
        text, entries, prompt = piece.text, list[TokenLogprob | int](piece.logprobs), self.prompt(piece.choice)
        echo = self._echo_text(piece.choice) if self.opens(state) else ""
        if self.opens(state):
            found = self.prompt_logprobs.get(self.prompt_of(piece.choice), [])
            entries = [*prompt[: len(prompt) - len(found)], *found, *entries]
        logprobs: CompletionLogprobs | None = None
        if self.body.logprobs is not None:
            offsets = self._prompt_offsets(piece.choice) if self.opens(state) else []
            if state.offsets is None:
                state.offsets = self._offsets(piece.choice, len(echo))
            offsets += state.offsets.push([item.token for item in piece.logprobs])
            logprobs = self.logprobs.completion(entries, self.body.logprobs, offsets)
        return CompletionChoice(
            index=piece.choice,
            text=echo + text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.tokens if self.with_ids else UNSET,
            prompt_token_ids=list(prompt) if self.with_ids and not state.begun else UNSET,
        )

    def whole(self, state: State, piece: Piece) -> CompletionChoice:
        """A continuation, with its prompt's log-probabilities if they were asked for."""
        choice = self.part(state, piece)
        choice.prompt_logprobs = self.prompt_rows(piece.choice)
        return choice

    def chunk_of(self, choices: Choices, usage: Usage | UnsetType | None) -> Completion:
        """A chunk looks like a reply."""
        return Completion(**self.facts, choices=choices, usage=usage)

    def reply_of(self, choices: Choices, usage: Usage) -> Completion:
        """All continuations."""
        return self.chunk_of(choices, usage)

    def _echo_text(self, choice: int) -> str:
        """The prompt as it was sent, or the text of its tokens if those were sent or some were cut off."""
        sent, prompt, tokenizer = self._sent(choice), self.prompt(choice), self.service.tokenizer
        if sent is not None:
            return sent
        if self._echo_only:
            return tokenizer.decode(prompt, skip_special_tokens=False)
        return prompt_text(tokenizer, prompt)

    def _sent(self, choice: int) -> str | None:
        """The prompt as it was sent; None if that was tokens or some were cut off."""
        sent = self.body.prompt
        if self.body.truncate_prompt_tokens is not None:
            return None
        found = sent if isinstance(sent, str) else sent[self.prompt_of(choice)]
        return found if isinstance(found, str) else None

    def _prompt_offsets(self, choice: int) -> list[int]:
        """Where the prompt's tokens begin in the echoed text."""
        sent, prompt, tokenizer = self._sent(choice), self.prompt(choice), self.service.tokenizer
        if sent is not None:
            return tokenizer.offsets(sent, self.body.add_special_tokens is not False)
        return Offsets(detokenizer(tokenizer, False)).push(prompt)

    def _offsets(self, choice: int, start: int) -> Offsets:
        """Where tokens begin that continue a text of `start` characters."""
        request = self.generation.requests[self.prompt_of(choice)]
        prompt, params = continued(self.service.engine.info, request.prompt), request.params
        skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
        return Offsets(detokenizer(self.service.tokenizer, skip, spaces, prompt=prompt), start)


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        body=(CompletionRequest,),
        reply=(Completion,),
        stream=SSE,
        generates=True,
        operation="text_completion",
        batchable=True,
    ),
)
