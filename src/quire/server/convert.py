"""OpenAI's fields -> `SamplingParams` and `Request`s that the engine can take unseen."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from quire.core.errors import BadRequest
from quire.core.params import MAX_LOGPROBS, SamplingParams
from quire.core.request import Request
from quire.engine.client import EngineInfo
from quire.engine.requests import bad_words_ids, check_scoring, held
from quire.server.errors import ContextTooLong
from quire.server.protocol import SamplingFields
from quire.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_NAME = 256

_PLAIN = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "logit_bias"),
)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def sampling_defaults(info: EngineInfo, generation_config: str) -> dict[str, Any]:
    """The model's own sampling defaults (its generation_config.json), or none for "vllm": then they are vLLM's."""
    if generation_config == "vllm":
        return {}
    return {k: v for k, v in info.generation_defaults.items() if k in SamplingParams.__struct_fields__}


def context_limit(info: EngineInfo) -> int:
    """Tokens one sequence can have at most: the model's context, or all of the KV cache if that is smaller."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def token_limit(asked: int | None, fallback: int | None, prompt_len: int, info: EngineInfo, field: str) -> int:
    """How many tokens may follow the prompt: `asked` if it fits, else refused; `fallback` is only a wish."""
    limit = context_limit(info)
    taken = held(info, prompt_len)
    room = limit - taken
    if room < 1:
        raise ContextTooLong(
            f"prompt: has {prompt_len} tokens, but the context holds {limit} and one must be left to generate",
            param="prompt",
        )
    if asked is None:
        return room if fallback is None else min(fallback, room)
    if asked > room:
        raise ContextTooLong(
            f"{field}: {prompt_len} prompt tokens and {field} {asked} make {taken + asked}, "
            f"but the context holds {limit} tokens; at most {room} can follow",
            param=field,
        )
    return asked


def sampling_params(
    body: SamplingFields, defaults: dict[str, Any], *, max_tokens: int, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """The sampling part of a request; raises `BadRequest` naming the field."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest("best_of: only best_of equal to n is offered", param="best_of")
    given = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = min(body.top_k, vocab_size)  # more is the same as all, and might not fit the engine's integers
    for name in _LISTS:
        value = getattr(body, name)
        if value is not None:
            given[name] = value if isinstance(value, str) else tuple(value)
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequest("prompt_logprobs: not offered with stream", param="prompt_logprobs")
    params = SamplingParams(**(defaults | given | {"max_tokens": max_tokens, "logprobs": logprobs}))
    params.validate(vocab_size)
    return params


def check_fields(body: SamplingFields, scheduling_policy: str) -> None:
    """Refuse what is known to be wrong before any work is done on the prompt."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: only allowed with stream", param="stream_options")
    if body.priority and scheduling_policy != "priority":
        raise BadRequest(
            "priority: has no effect unless the server runs --scheduling-policy priority", param="priority"
        )
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise BadRequest("priority: must fit in 32 bits", param="priority")
    for name in ("cache_salt", "request_id"):
        value = getattr(body, name)
        if value is not None and not 0 < len(value) <= MAX_NAME:
            raise BadRequest(f"{name}: must have 1 to {MAX_NAME} characters", param=name)
    if body.request_id is not None and not body.request_id.isprintable():
        raise BadRequest("request_id: must be printable", param="request_id")
    words = body.bad_words or ()
    if len(words) > MAX_BAD_WORDS or not all(0 < len(w) <= MAX_BAD_WORD_CHARS for w in words):
        raise BadRequest(
            f"bad_words: at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters", param="bad_words"
        )


def check_logprobs(name: str, value: int | None) -> None:
    """`value` top log-probabilities per token can be had."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise BadRequest(f"{name}: must lie in [0, {MAX_LOGPROBS}]", param=name)


def new_id(prefix: str, body: SamplingFields) -> str:
    """The id a client sees: `cmpl-<hex>` or `chatcmpl-<hex>`, or its own `request_id` behind the prefix."""
    return f"{prefix}-{body.request_id or secrets.token_hex(16)}"


def build_requests(
    body: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    info: EngineInfo,
    tokenizer: Tokenizer,
    arrival: float,
    draw_seed: Callable[[], int],
) -> list[Request]:
    """One engine request per prompt. Ids are drawn here, so a client's own id can never collide in the engine."""
    for param in params:
        check_scoring(info, param)
    eos = info.eos_token_ids
    banned = bad_words_ids(tokenizer, body.bad_words or ())
    return [
        Request(
            id=secrets.token_hex(12),
            prompt=tuple(prompt),
            params=param,
            seed=param.seed if param.seed is not None else draw_seed(),
            arrival=arrival,
            eos_token_ids=eos,
            bad_words_ids=banned,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            adapter=body.model if body.model in info.adapters else "",
        )
        for prompt, param in zip(prompts, params, strict=True)
    ]
