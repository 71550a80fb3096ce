"""TGI's API over completions: /generate, /generate_stream and /info (text-generation-inference, docs/openapi.json)."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.params import (
    MAX_STOP_STRINGS,
    Logprobs,
    MaxTokens,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from quire.core.request import TokenLogprob, longest_prompt
from quire.features.images.edge_image_sources import ImageSource
from quire.server.apis.answer import Answer, respond
from quire.server.apis.fields import StreamField
from quire.server.apis.openai.completions import submit_completion
from quire.server.apis.openai.protocol import CompletionRequest
from quire.server.apis.openai.sampling_params import check_body, mapped_fields
from quire.server.apis.tei.info import TeiInfo, tei_info
from quire.server.http.body import off_loop, off_read, read_struct
from quire.server.http.dialects import TGI
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import SSE, Route
from quire.server.http.sse import event
from quire.server.service import VERSION, Service
from quire.server.text_generation.generation import Generated, Piece
from quire.server.text_generation.reports import Report

MAX_NEW_TOKENS = 100
_IMAGE = re.compile(r"!\[\]\(([^)\s]*)\)")
"""An image in a text, as TGI reads it of models that take some (Markdown's)."""
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
FIELD_NAMES = {"prompt_logprobs": "parameters.decoder_input_details",
           "max_tokens": "parameters.max_new_tokens", "prompt": "inputs", "structured_outputs": "parameters.grammar",
           "truncate_prompt_tokens": "parameters.truncate", "logprobs": "parameters.top_n_tokens",
           "model": "parameters.adapter_id", **{name: f"parameters.{name}" for name in _SAMPLING}}  # fmt: skip
"""Fields of completions by which errors may go, and what they are called here."""
_GRAMMARS = {"json": "json", "json_object": "json", "json_schema": "json", "regex": "regex"}


class TgiParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample: greedily unless one of temperature, top_k and top_p is given, or `do_sample`."""

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    max_new_tokens: MaxTokens | None = None
    seed: Seed | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Logprobs | None = None
    best_of: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None
    watermark: bool | None = None
    typical_p: float | None = None


class TgiRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /generate and /generate_stream."""

    inputs: Annotated[str, about("The text to continue.")]
    parameters: Annotated[
        TgiParameters | None,
        about("TGI's: max_new_tokens, do_sample, temperature, top_k, top_p, seed, stop, grammar and others."),
    ] = None


class TgiCompatRequest(TgiRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /: one of the two, as `stream` says."""

    stream: StreamField = None


class TgiToken(msgspec.Struct, kw_only=True):
    """A token; `logprob` in nats."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiDetails(msgspec.Struct, kw_only=True):
    """Why and where it ended; lists are of a whole reply, `input_length` of a stream."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int | UnsetType = UNSET
    prefill: list[TgiToken] | UnsetType = UNSET
    tokens: list[TgiToken] | UnsetType = UNSET
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiReply(msgspec.Struct, kw_only=True):
    """Response of /generate."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


class TgiChunk(msgspec.Struct, kw_only=True):
    """An event of /generate_stream: a token; the last one has all of the text."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiDetails | None = None
    quire: Report | UnsetType = UNSET


class Info(msgspec.Struct, kw_only=True):
    """Response of /info."""

    model_id: str
    model_dtype: str
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int = 1
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int = 1
    router: str = "quire"
    version: str


async def generate(service: Service, request: Request) -> Response:
    """Continue a text in TGI's format."""
    return await _generate(service, request, await read_struct(request, service.options, lambda _: TgiRequest))


async def generate_stream(service: Service, request: Request) -> Response:
    """Continue a text in TGI's format, as one event for each token."""
    body = await read_struct(request, service.options, lambda _: TgiRequest)
    return await _generate(service, request, body, stream=True)


async def compat_generate(service: Service, request: Request) -> Response:
    """Continue a text in TGI's format, for clients whose URL has no path. The reply is a list or a stream."""
    body = await read_struct(request, service.options, lambda _: TgiCompatRequest)
    return await _generate(service, request, body, stream=bool(body.stream), listed=True)


async def info(service: Service, request: Request) -> Response:
    """Return the server's properties: in TGI's format, or for a model that writes no text in TEI's."""
    facts = service.engine.info
    if not facts.pooling.generates:
        return JsonResponse(msgspec.json.encode(tei_info(service)))
    found = Info(
        model_id=service.names[0],
        model_dtype=facts.dtype,
        max_concurrent_requests=facts.max_num_queued_reqs,
        max_stop_sequences=MAX_STOP_STRINGS,
        max_input_tokens=longest_prompt(facts.max_model_len),
        max_total_tokens=facts.max_model_len,
        version=VERSION,
    )
    return JsonResponse(msgspec.json.encode(found))


async def _generate(
    service: Service, request: Request, body: TgiRequest, stream: bool = False, listed: bool = False
) -> Response:
    arrival, sources = time.monotonic(), list[ImageSource]()
    if service.engine.info.takes_images:
        text, sources = await off_read(request, _with_image_marks, service, body.inputs)
        body = msgspec.structs.replace(body, inputs=text)
    asked = completion_of(body)
    with mapped_fields(FIELD_NAMES):
        check_body(service, asked)
        generation = await submit_completion(service, asked, arrival, request.state.tenant, each=True, sources=sources)
    answer = _Answer(service, generation, body, stream=stream, listed=listed and not stream)
    return await respond(request, answer)


def _with_image_marks(service: Service, text: str) -> tuple[str, list[ImageSource]]:
    """A text with the model's own marks, and the images."""
    sources = [ImageSource("inputs", url) for url in _IMAGE.findall(text)]
    service.media.admit(sources)
    return _IMAGE.sub(lambda _: service.media.mark, text), sources


def completion_of(body: TgiRequest) -> CompletionRequest:
    """What `body` asks for, as a completion. `BadRequest` naming the parameter that cannot be had."""
    given = body.parameters or TgiParameters()
    for name, ok, why in (
        ("watermark", (None, False), "texts are not marked here"),
        ("typical_p", (None, 1.0), "typical sampling is not built"),
        ("best_of", (None, 1), "only 1 is offered"),
    ):
        if getattr(given, name) not in ok:
            raise BadRequest(f"parameters.{name}: {why}", param=f"parameters.{name}")
    fields: dict[str, Any] = {name: getattr(given, name) for name in _SAMPLING}
    if not given.do_sample and given.temperature is None and given.top_k is None and given.top_p is None:
        fields["temperature"] = 0.0
    if given.grammar is not None:
        kind = given.grammar.get("type")
        if not isinstance(kind, str) or kind not in _GRAMMARS:
            told = f"parameters.grammar.type: must be one of {', '.join(_GRAMMARS)}"
            raise BadRequest(told, param="parameters.grammar.type")
        fields["structured_outputs"] = {_GRAMMARS[kind]: given.grammar.get("value")}
    return CompletionRequest(
        **fields,
        prompt=body.inputs,
        model=given.adapter_id,
        max_tokens=MAX_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        truncate_prompt_tokens=given.truncate,
        logprobs=given.top_n_tokens or 0,
        prompt_logprobs=0 if given.decoder_input_details else None,
        include_stop_str_in_output=True,
    )


class _Answer(Answer):
    """One continuation, a token in each piece. `listed`: the reply is in a list."""

    dialect = TGI

    def __init__(
        self, service: Service, generation: Generated, body: TgiRequest, *, stream: bool, listed: bool
    ) -> None:
        super().__init__(service, generation, service.names[0], stream)
        self._given = body.parameters or TgiParameters()
        self._lead = body.inputs if self._given.return_full_text else ""
        self._listed = listed
        self._text: list[str] = []
        self._tokens: list[TokenLogprob] = []
        self._prefill: list[TokenLogprob] = []
        self._last = Piece(0, "", [], [], None)

    async def events(self, pieces: list[Piece]) -> bytes:
        """An event for each token but the last one, which waits for `tail`."""
        said = []
        for piece in pieces:
            had = len(self._tokens)
            self.add([piece])
            if piece.finish_reason is None and len(self._tokens) > had:
                said.append(event(self._chunk(piece.text)))
        return b"".join(said)

    def tail(self) -> bytes:
        """The last token, and all of the text."""
        if not self._tokens:
            return b""
        chunk = self._chunk(self._last.text)
        chunk.generated_text = self._lead + "".join(self._text)
        chunk.details, chunk.quire = self._details(), self.verdict
        chunk.details.input_length = self.generation.usage().prompt_tokens
        return event(chunk)

    def add(self, pieces: list[Piece]) -> None:
        """Collect."""
        for piece in pieces:
            self._text.append(piece.text)
            self._tokens += piece.logprobs
            self._prefill += piece.prompt_logprobs or ()
            if piece.finish_reason is not None:
                self._last = piece

    async def reply(self) -> list[bytes]:
        """Reply with the whole answer."""
        return [await off_loop(sum(map(len, self._text)), self._reply)]

    def _reply(self) -> bytes:
        reply = TgiReply(generated_text=self._lead + "".join(self._text), quire=self.verdict)
        if self._given.details or self._given.decoder_input_details:
            reply.details = details = self._details()
            details.prefill = [self._token(item) for item in self._prefill]
            details.tokens = [self._token(item) for item in self._tokens]
            if self._given.top_n_tokens:
                details.top_tokens = [self._top(item) for item in self._tokens]
        return msgspec.json.encode([reply] if self._listed else reply)

    def _chunk(self, text: str) -> TgiChunk:
        item = self._tokens[-1]
        chunk = TgiChunk(index=len(self._tokens), token=self._token(item))
        if not chunk.token.special:
            chunk.token.text = text  # clients join these, and a token alone may be a part of a character
        if self._given.top_n_tokens:
            chunk.top_tokens = self._top(item)
        return chunk

    def _details(self) -> TgiDetails:
        word = isinstance(self._last.stop_reason, str)
        reason = "length" if self._last.finish_reason == "length" else "stop_sequence" if word else "eos_token"
        [request] = self.generation.requests
        seed = None if request.params.temperature == 0.0 else request.seed
        return TgiDetails(finish_reason=reason, generated_tokens=self.generation.usage().completion_tokens, seed=seed)

    def _token(self, item: TokenLogprob) -> TgiToken:
        return self._named(item.token, item.logprob)

    def _top(self, item: TokenLogprob) -> list[TgiToken]:
        return [self._named(token, logprob) for token, logprob in item.top[: self._given.top_n_tokens]]

    def _named(self, token: int, logprob: float) -> TgiToken:
        tokenizer = self.service.tokenizer
        special = tokenizer.is_special(token)
        return TgiToken(id=token, text=tokenizer.id_to_text(token), logprob=max(logprob, -9999.0), special=special)


_ADAPTER = "parameters.adapter_id"
ROUTES = (
    Route(
        "POST",
        "/generate",
        generate,
        body=(TgiRequest,),
        reply=(TgiReply,),
        dialect=TGI,
        generates=True,
        operation="text_completion",
        model_field=_ADAPTER,
    ),
    Route(
        "POST",
        "/generate_stream",
        generate_stream,
        body=(TgiRequest,),
        reply=(TgiChunk,),
        stream=SSE,
        dialect=TGI,
        generates=True,
        operation="text_completion",
        model_field=_ADAPTER,
    ),
    Route(
        "POST",
        "/",
        compat_generate,
        body=(TgiCompatRequest,),
        reply=(TgiReply,),
        reply_is_list=True,
        stream=SSE,
        dialect=TGI,
        generates=True,
        operation="text_completion",
        model_field=_ADAPTER,
    ),
    Route("GET", "/info", info, reply=(Info, TeiInfo), dialect=TGI),
)
