"""OpenAI's fields -> `SamplingParams` and `Request`s that the engine can take unseen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from quire.core.errors import BadRequest, ContextTooLong, NotFound
from quire.core.options.ranges import check_ranges
from quire.core.params import MAX_N, SamplingParams
from quire.core.request import Explain, Request, random_id
from quire.engine.client import EngineInfo
from quire.engine.requests import EncodedPrompt, ids_of_words, make_request, room
from quire.server.apis.openai.beam_search import Beams, beam_params, check_beams
from quire.server.apis.openai.protocol import SamplingFields
from quire.server.apis.openai.structured_output import OutputShape, with_grammars
from quire.server.apis.unsupported import refuse_unbuilt, without_effect
from quire.server.http.body import ID_BYTES, in_turns, off_loop, read_struct
from quire.server.keys import Tenant
from quire.server.service import Service

Body = TypeVar("Body", bound=SamplingFields)

COMPLETION_MAX_TOKENS = 16
MAX_NAME = 256

_SHARED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name not in ("max_tokens", "structured_outputs")
)


async def read_body(
    service: Service, request: HttpRequest, kind: type[Body], built: frozenset[str] = frozenset()
) -> Body:
    """The body as a `kind`, refused if it names what is not served or not `built`, or is known to be wrong."""
    body = await read_struct(request, service.options, lambda _: kind)
    check_body(service, body, built)
    request.state.ignored.extend(without_effect(body))
    return body


def check_body(service: Service, body: SamplingFields, built: frozenset[str] = frozenset()) -> None:
    """Refuse what names what is not served or not `built`, or is known to be wrong, before any work on the prompt."""
    refuse_unbuilt(body, built=built)
    service.check_model(body.model)
    _check_fields(body, service.config.scheduler.scheduling_policy)


@contextlib.contextmanager
def mapped_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the request that was made of another API's body name the field of that."""
    try:
        yield
    except (BadRequest, NotFound) as error:
        param = error.param or ""
        field = next((name for name in names if re.match(rf"{re.escape(name)}(?![A-Za-z0-9_])", param)), None)
        if field is None:
            raise
        own = names[field] + param.removeprefix(field)
        raise type(error)(error.about(own), param=own) from None


def token_limit(
    info: EngineInfo, prompt_len: int, param: str, asked: int | None, field: str, fallback: int | None
) -> int:
    """How many tokens may follow the prompt, which came as `param`: `asked` if it fits, else refused.

    `fallback` is only a wish. `field` is the name under which it was asked for.
    """
    left = room(info, prompt_len, param)
    if asked is None:
        return left if fallback is None else min(fallback, left)
    if asked > left:
        limit = info.max_model_len
        total = limit - left + asked
        raise ContextTooLong(
            lambda name: (
                f"{name}: {prompt_len} prompt tokens and {name} {asked} make {total}, "
                f"but the context holds {limit} tokens; at most {left} can follow"
            ),
            param=field,
        )
    return asked


def sampling_params(
    body: SamplingFields,
    defaults: dict[str, Any],
    asked: OutputShape,
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """The sampling part of a request, its ranges not checked yet; raises `BadRequest` naming the field."""
    given = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = min(body.top_k, vocab_size)  # more is the same as all, and might not fit the engine's integers
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequest("prompt_logprobs: not offered with stream", param="prompt_logprobs")
    if drawn(body) > (body.n or 1):
        given["n"], logprobs = drawn(body), logprobs or 0  # the best are found by their log-probabilities
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": asked.shape}
    return SamplingParams(**(defaults | given))


def beams_of(service: Service, body: SamplingFields, requests: Sequence[Request]) -> Beams:
    """The search that `body` asks for behind the prompts of `requests`."""
    most = max(request.params.max_tokens or 1 for request in requests)
    if service.engine.info.decoder_start is not None:
        raise BadRequest("use_beam_search: this model's encoder would read beams as prompts", param="use_beam_search")
    return Beams(service.engine, service.tokenizer, requests, beam_params(body, most))


def drawn(body: SamplingFields) -> int:
    """How many answers are drawn of each prompt, of which the best `n` are sent."""
    return max(1, body.n or 1, body.best_of or 1)


def _check_best_of(body: SamplingFields) -> None:
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return
    if not n <= body.best_of <= MAX_N:
        raise BadRequest(f"best_of: must lie in [n, {MAX_N}], and n is {n}", param="best_of")
    if body.stream:
        raise BadRequest("best_of: the best are known at the end; leave out stream, or best_of", param="best_of")
    if body.use_beam_search:
        raise BadRequest("best_of: n is the number of beams; leave best_of out", param="best_of")


def _check_fields(body: SamplingFields, scheduling_policy: str) -> None:
    """Refuse what is known to be wrong before any work is done on the prompt."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: only allowed with stream", param="stream_options")
    if body.priority and scheduling_policy != "priority":
        raise BadRequest(
            "priority: has no effect unless the server runs --scheduling-policy priority", param="priority"
        )
    check_ranges(body, ("priority",))
    _check_best_of(body)
    check_beams(body)
    for name in ("cache_salt", "request_id"):
        value = getattr(body, name)
        if value is not None and not 0 < len(value) <= MAX_NAME:
            raise BadRequest(f"{name}: must have 1 to {MAX_NAME} characters", param=name)
    if body.request_id is not None and not body.request_id.isprintable():
        raise BadRequest("request_id: must be printable", param="request_id")


def new_id(prefix: str, body: SamplingFields) -> str:
    """The id a client sees: `cmpl-<hex>` or `chatcmpl-<hex>`, or its own `request_id` behind the prefix."""
    return f"{prefix}-{body.request_id or random_id()}"


async def build_requests(
    service: Service,
    body: SamplingFields,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    arrival: float,
    tenant: Tenant,
    asked: OutputShape,
    shown: int = 1,
) -> list[Request]:
    """One engine request per prompt. Ids are drawn here, so a client's own id can never collide in the engine.

    The salt of `tenant` begins that of the prefix cache, whatever the body's own `cache_salt`. `asked`: what `params`
    were made of. `shown`: choices that show their prompt.
    """
    info, words = service.engine.info, body.bad_words or ()
    work = service.tokenizer.work(2 * sum(map(len, words))) if words else 0
    banned = await off_loop(work, ids_of_words, service.tokenizer, words)
    requests = []
    async for prompt, param in in_turns(zip(prompts, params, strict=True)):
        made = await off_loop(
            ID_BYTES * (len(prompt.ids) + len(param.allowed_token_ids or ()) + len(param.logit_bias)),
            make_request,
            info,
            prompt,
            param,
            request_id=random_id(),
            seed=service.draw_seed() if param.seed is None else param.seed,
            bad_words_ids=banned,
            priority=body.priority or 0,
            adapter=service.adapter(body.model),
        )
        requests.append(made)
    salt = tenant.salt + (body.cache_salt or "")
    explain: Explain = "no"
    if body.quire is not None and body.quire.cache:
        explain = "all" if service.options.explain_other_tenants else "own"
    own = {
        "arrival": arrival,
        "cache_salt": salt,
        "tenant": tenant.called(body.user),
        "weight": tenant.weight,
        "explain": explain,
    }
    found = await with_grammars(service, body, asked, [msgspec.structs.replace(r, **own) for r in requests])
    name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    _check_scored(found, shown, service.options.max_prompt_logprobs, name)
    return found


def _check_scored(requests: Sequence[Request], shown: int, limit: int, param: str) -> None:
    """Refuse more log-probabilities of prompts than a reply may have: each is some 100 bytes, here and in the reply."""
    asked = [(len(r.prompt), r.params.prompt_logprobs) for r in requests if r.params.prompt_logprobs is not None]
    count = shown * sum(tokens * (1 + k) for tokens, k in asked)
    if count > limit:
        tokens, k = sum(tokens for tokens, _ in asked), max(k for _, k in asked)
        raise BadRequest(
            f"{param}: {tokens} tokens of prompts with {k + 1} log-probabilities each, for {shown} choices, make "
            f"{count}; this server gives at most {limit} (--max-prompt-logprobs)",
            param=param,
        )
