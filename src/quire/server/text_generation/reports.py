"""What is told of a request's work: tokens read and written, where the time went, what the prefix cache had."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.request import Miss, Request
from quire.engine.frontend.request_times import Moments, Timings
from quire.text.structured.schema_checker import SchemaError


class CachedTokens(msgspec.Struct, kw_only=True):
    """How much of the prompt came from the prefix cache, and where there are images, how many of its tokens are rows
    of theirs."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


def details(cached: int, requests: Iterable[Request]) -> CachedTokens:
    """Details of `requests`, of whose prompts `cached` tokens were found."""
    rows = sum(image.rows for request in requests for image in request.images)
    return CachedTokens(cached_tokens=cached, image_tokens=rows or UNSET)


class CompletionTokens(msgspec.Struct, kw_only=True):
    """Tokens guessed ahead that were kept, and that were not; tokens of reasoning."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class LlamaCppTimings(msgspec.Struct, kw_only=True):
    """Milliseconds and tokens per second of the prompt's part that was not cached, and of what was generated."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def llama_cpp_timings(usage: Usage, times: Timings) -> LlamaCppTimings:
    """Where the time went so far, as llama.cpp's server says it."""
    cached = usage.prompt_tokens_details.cached_tokens
    read, written = usage.prompt_tokens - cached, usage.completion_tokens
    prompt, predicted = times.prefill_seconds or 0.0, times.decode_seconds or 0.0
    return LlamaCppTimings(
        cache_n=cached,
        prompt_n=read,
        prompt_ms=1e3 * prompt,
        prompt_per_token_ms=1e3 * prompt / max(1, read),
        prompt_per_second=read / prompt if prompt else 0.0,
        predicted_n=written,
        predicted_ms=1e3 * predicted,
        predicted_per_token_ms=1e3 * predicted / max(1, written),
        predicted_per_second=written / predicted if predicted else 0.0,
    )


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache had of a prompt, and where and why it had no more; null: all but the last token."""

    prompt_tokens: int
    hit_tokens: int
    first_miss: Miss | None


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one prompt; `id`: what the engine calls it."""

    id: str
    timings: Timings | UnsetType = UNSET
    cache: CacheReport | UnsetType = UNSET
    clock: Moments | UnsetType = UNSET


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a body's `quire`: of one prompt as it is, of several in `prompts`, in their order.

    `request_id` is that of the header x-request-id, and of the access log. `schema_errors` comes unasked, where an
    answer is not all that its JSON schema asks for.
    """

    request_id: str
    id: str | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    cache: CacheReport | UnsetType = UNSET
    clock: Moments | UnsetType = UNSET
    prompts: list[PromptReport] | UnsetType = UNSET
    schema_errors: list[SchemaError] | UnsetType = UNSET
