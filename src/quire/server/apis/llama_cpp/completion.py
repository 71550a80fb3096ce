"""llama.cpp's own API over completions: /completion, /props and /slots (its tools/server/README.md)."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.params import Bias, Logprobs, RepetitionPenalty, SamplingParams
from quire.core.request import TokenLogprob, random_id
from quire.engine.requests import LLAMA_CPP_SAMPLING
from quire.features.images.edge_image_sources import Base64, ImageSource
from quire.server.apis.answer import Answer, respond
from quire.server.apis.fields import (
    FrequencyPenaltyField,
    IgnoreEosField,
    MinPField,
    ModelField,
    PresencePenaltyField,
    SeedField,
    StreamField,
    TemperatureField,
    TimingsPerTokenField,
    TopKField,
    TopPField,
)
from quire.server.apis.openai.choices import State
from quire.server.apis.openai.completions import submit_completion
from quire.server.apis.openai.logprobs import LogprobWriter
from quire.server.apis.openai.protocol import CompletionRequest
from quire.server.apis.openai.sampling_params import check_body, mapped_fields
from quire.server.http.body import off_loop, off_read, read_struct
from quire.server.http.dialects import LLAMA_CPP
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import SSE, Route
from quire.server.http.sse import event
from quire.server.service import VERSION, Service
from quire.server.text_generation.generation import Generated, Piece
from quire.server.text_generation.reports import LlamaCppTimings, Report, llama_cpp_timings

MARK = "<__media__>"
"""Where an image stands in a prompt."""
FIELD_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
"""Fields of completions by which errors may go, and what they are called here."""
_SAME = ("model", "prompt", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop",
         "ignore_eos", "stream", "grammar", "json_schema")  # fmt: skip


class ImagePrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt with images: base64, each for a mark `<__media__>` of the text."""

    prompt_string: str
    multimodal_data: list[str] | None = None


class LlamaCppRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /completion. `n_predict` and `seed` of -1 are none; `cache_prompt` false: nothing cached is used."""

    prompt: Annotated[
        str | list[str | int | list[int]] | ImagePrompt,
        about("Text to continue, token ids, or a list of either; the reply is then a list."),
    ]
    model: ModelField = None
    n_predict: Annotated[int | None, about("Largest number of output tokens; -1 = until the context is full.")] = None
    stream: StreamField = None
    temperature: TemperatureField = None
    top_k: TopKField = None
    top_p: TopPField = None
    min_p: MinPField = None
    repeat_penalty: Annotated[RepetitionPenalty | None, about("As repetition_penalty of completions.")] = None
    presence_penalty: PresencePenaltyField = None
    frequency_penalty: FrequencyPenaltyField = None
    stop: Annotated[list[str] | None, about("Stop strings. They end the output and are not part of it.")] = None
    seed: SeedField = None
    ignore_eos: IgnoreEosField = None
    logit_bias: Annotated[
        list[list[Any]] | dict[int, Bias] | None,
        about("Added to logits, by token id: -100 forbids a token, 100 forces it."),
    ] = None
    n_probs: Annotated[Logprobs | None, about("Return logprobs of so many most probable tokens.")] = None
    cache_prompt: Annotated[bool | None, about("false: do not use the prefix cache.")] = None
    return_tokens: Annotated[bool | None, about("The reply has token ids.")] = None
    timings_per_token: TimingsPerTokenField = None
    grammar: Annotated[str | None, about("A grammar (GBNF or Lark) that the output must match.")] = None
    json_schema: Annotated[dict[str, Any] | None, about("A JSON schema that the output must match.")] = None


class LlamaCppReply(msgspec.Struct, kw_only=True):
    """Response of /completion, and each event of its stream; what follows `tokens_evaluated` comes at the end."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


class Props(msgspec.Struct, kw_only=True):
    """Response of /props. A slot is a place in the batch."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str


async def completion(service: Service, request: Request) -> Response:
    """Continue a prompt in llama.cpp's format, whole or as a stream of events."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: LlamaCppRequest)
    sources = list[ImageSource]()
    if isinstance(body.prompt, ImagePrompt):
        text, sources = await off_read(request, _with_image_marks, service, body.prompt)
        body = msgspec.structs.replace(body, prompt=text)
    asked = completion_of(service, body)
    with mapped_fields(FIELD_NAMES):
        check_body(service, asked)
        generation = await submit_completion(service, asked, arrival, request.state.tenant, most=None, sources=sources)
    return await respond(request, _Answer(service, generation, body))


def _with_image_marks(service: Service, prompt: ImagePrompt) -> tuple[str, list[ImageSource]]:
    """The text with the model's own marks, and the images."""
    at = "prompt.multimodal_data"
    sources = [ImageSource(f"{at}[{i}]", Base64(text)) for i, text in enumerate(prompt.multimodal_data or ())]
    service.media.admit(sources)
    if prompt.prompt_string.count(MARK) != len(sources):
        raise BadRequest(f"{at}: {len(sources)} images came, and the text has another number of {MARK}", param=at)
    return prompt.prompt_string.replace(MARK, service.media.mark), sources


def completion_of(service: Service, body: LlamaCppRequest) -> CompletionRequest:
    """What `body` asks for, as a completion. It goes on until the model ends it or the context is full, as there."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    found = service.defaults_or(LLAMA_CPP_SAMPLING)
    fields |= {name: found[name] for name in LLAMA_CPP_SAMPLING if fields[name] is None and name in found}
    return CompletionRequest(
        **fields,
        max_tokens=None if body.n_predict == -1 else body.n_predict,
        seed=None if body.seed == -1 else body.seed,
        repetition_penalty=body.repeat_penalty,
        logprobs=body.n_probs or None,
        logit_bias=_biases(body.logit_bias),
        cache_salt=random_id() if body.cache_prompt is False else None,
    )


def _biases(given: list[list[Any]] | dict[int, float] | None) -> dict[int, float] | None:
    """Pairs of a token's id and its bias; false there forbids the token."""
    if not isinstance(given, list):
        return given
    found: dict[int, float] = {}
    for i, pair in enumerate(given):
        if len(pair) != 2 or type(pair[0]) is not int or not isinstance(pair[1], (int, float)) or pair[1] is True:
            raise BadRequest(f"logit_bias[{i}]: must be [token id, number or false]", param=f"logit_bias[{i}]")
        found[pair[0]] = -100.0 if pair[1] is False else float(pair[1])
    return found


class _Answer(Answer):
    """A continuation of each prompt."""

    dialect = LLAMA_CPP

    def __init__(self, service: Service, generation: Generated, body: LlamaCppRequest) -> None:
        super().__init__(service, generation, service.answering(body.model), bool(body.stream))
        self._body = body
        self._names = LogprobWriter(service.tokenizer, as_ids=False)
        self._states = [State() for _ in generation.requests]

    async def events(self, pieces: list[Piece]) -> bytes:
        """An event for each piece."""
        return b"".join(event(self._part(piece)) for piece in pieces if self._note(piece))

    def _note(self, piece: Piece) -> bool:
        """Keep why a continuation ended; whether there is more to say."""
        state = self._states[piece.choice]
        if piece.finish_reason is not None:
            state.finish_reason, state.stop_reason = piece.finish_reason, piece.stop_reason
        return bool(piece.text or piece.tokens)

    def tail(self) -> bytes:
        """The account of each."""
        empty = (Piece(choice, "", [], [], None) for choice in range(len(self._states)))
        return b"".join(event(self._ended(self._part(piece))) for piece in empty)

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""
        for piece in pieces:
            self._states[piece.choice].add(piece)

    async def reply(self) -> list[bytes]:
        """Reply with the whole answer, a list where a list of prompts came."""
        whole = [state.whole(choice) for choice, state in enumerate(self._states)]
        said = [self._ended(self._part(piece)) for piece in whole]
        several = isinstance(self._body.prompt, list) and not isinstance(self._body.prompt[0], int)
        size = sum(len(piece.text) for piece in whole)
        return [await off_loop(size, msgspec.json.encode, said if several else said[0])]

    def _part(self, piece: Piece) -> LlamaCppReply:
        usage = self.generation.usage(piece.choice)
        reply = LlamaCppReply(
            index=piece.choice,
            content=piece.text,
            tokens=piece.tokens if self._body.return_tokens or self.stream else [],
            stop=False,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
        )
        if self._body.n_probs and piece.logprobs:
            reply.completion_probabilities = [self._entry(item) for item in piece.logprobs]
        if self._body.timings_per_token:
            reply.timings = self._timings(piece.choice)
        return reply

    def _entry(self, item: TokenLogprob) -> dict[str, Any]:
        [found] = self._names.chat([item], self._body.n_probs or 0).content
        top = [
            {"id": token, "token": other.token, "bytes": other.bytes, "logprob": other.logprob}
            for (token, _), other in zip(item.top, found.top_logprobs, strict=False)
        ]
        return {"id": item.token, "token": found.token, "bytes": found.bytes, "logprob": found.logprob,
                "top_logprobs": top}  # fmt: skip

    def _ended(self, reply: LlamaCppReply) -> LlamaCppReply:
        state, request = self._states[reply.index], self.generation.requests[reply.index]
        word = state.stop_reason if isinstance(state.stop_reason, str) else ""
        reply.stop, reply.model, reply.truncated = True, self.model, False
        reply.stop_type = "limit" if state.finish_reason == "length" else "word" if word else "eos"
        reply.stopping_word = word
        reply.prompt = self._prompt(reply.index)
        reply.generation_settings = settings_of(self.service, request.params)
        reply.tokens_cached = self.generation.usage(reply.index).prompt_tokens_details.cached_tokens
        reply.timings, reply.quire = self._timings(reply.index), self.verdict
        return reply

    def _prompt(self, choice: int) -> str:
        sent = self._body.prompt
        text = sent[choice] if isinstance(sent, list) else sent
        if isinstance(text, str):
            return text
        shown = self.service.media.shown(self.generation.requests[choice])
        return self.service.tokenizer.decode(shown, skip_special_tokens=False)

    def _timings(self, choice: int) -> LlamaCppTimings:
        times = self.generation.timings(self.generation.requests[choice])
        return llama_cpp_timings(self.generation.usage(choice), times)


def settings_of(service: Service, params: Any) -> dict[str, Any]:
    """Sampling by llama.cpp's names; `params`: `SamplingParams`."""
    return {
        "n_ctx": service.engine.info.max_model_len,
        "n_predict": params.max_tokens,
        "seed": params.seed if params.seed is not None else -1,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [list(pair) for pair in params.logit_bias.items()],
    }


class Slot(msgspec.Struct, kw_only=True):
    """Entry of the list of /slots."""

    id: int
    n_ctx: int
    is_processing: bool


async def props(service: Service, request: Request) -> Response:
    """Return the server's properties in llama.cpp's format."""
    info = service.engine.info
    params = settings_of(service, SamplingParams(**(service.defaults_or(LLAMA_CPP_SAMPLING) | {"max_tokens": None})))
    params["n_predict"] = -1
    found = Props(
        default_generation_settings={"n_ctx": info.max_model_len, "params": params},
        total_slots=service.config.scheduler.max_num_seqs,
        model_path=info.folder or info.model,
        chat_template="" if service.template is None else service.template.source,
        modalities={"vision": info.takes_images, "audio": False},
        build_info=f"quire {VERSION}",
    )
    return JsonResponse(msgspec.json.encode(found))


async def slots(service: Service, request: Request) -> Response:
    """List slots in llama.cpp's format. While n requests run, the list shows the first n slots as busy."""
    limit = service.engine.info.max_model_len
    busy = service.engine.in_flight
    places = service.config.scheduler.max_num_seqs
    found = [Slot(id=i, n_ctx=limit, is_processing=i < busy) for i in range(places)]
    return JsonResponse(msgspec.json.encode(found))


ROUTES = (
    Route(
        "POST",
        "/completion",
        completion,
        body=(LlamaCppRequest,),
        reply=(LlamaCppReply,),
        reply_may_be_list=True,
        stream=SSE,
        dialect=LLAMA_CPP,
        generates=True,
        operation="text_completion",
    ),
    Route("GET", "/props", props, reply=(Props,), dialect=LLAMA_CPP),
    Route("GET", "/slots", slots, reply=(Slot,), reply_is_list=True, dialect=LLAMA_CPP),
)
