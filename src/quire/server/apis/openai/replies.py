"""The bodies of responses, in OpenAI's shape; fields that vLLM adds are left out where they were not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.options.fields import about
from quire.server.http.json_parts import Parts
from quire.server.text_generation.reports import LlamaCppTimings, Report, Usage

PromptLogprobs = Iterator[dict[str, Any] | None]


class CompletionLogprobs(Parts, kw_only=True):
    """Parallel lists, one entry per token."""

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class CompletionChoice(Parts, kw_only=True):
    """One continuation, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Parts, kw_only=True):
    """Response, and chunk, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """One token with its log-probability in nats and its exact bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The chosen token beside the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Parts, kw_only=True):
    """One entry per token of the content."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionPart(msgspec.Struct, kw_only=True):
    """A function's name, and arguments as JSON; in a stream the name comes first and arguments piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A call of a tool, or a piece of the one that has this index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's answer; content is null where it only calls tools or reasons."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message; the first one names the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(Parts, kw_only=True):
    """One finished answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Parts, kw_only=True):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One SSE event of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A name that requests may give, and its model. `input_modalities`: text and image, where it takes images.

    `quire`: the passport of a folder that has one, what was measured of the model. `status`: loaded, loading, unloaded
    or failed; then `error` says why. `pinned`: it is loaded at the start, and stays. `needed_bytes`: of weights and KV
    cache, as the headers of its files say, or the engine that the server was started with.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any] = msgspec.field(default_factory=list)
    input_modalities: list[str] | UnsetType = UNSET
    quire: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    status: str
    pinned: bool
    needed_bytes: int
    error: str | None = None


def modalities(takes_images: bool) -> list[str] | UnsetType:
    """What a model reads, where it takes images."""
    return ["text", "image"] if takes_images else UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Text(msgspec.Struct, kw_only=True):
    """Response of /detokenize: the text by vLLM's name, and by llama.cpp's."""

    prompt: str
    content: str


class Prompt(msgspec.Struct, kw_only=True):
    """Response of /apply-template."""

    prompt: str


class Health(msgspec.Struct, kw_only=True):
    """Response of /health."""

    status: str


class Readiness(msgspec.Struct, kw_only=True):
    """Response of /readyz: ready where all checks hold."""

    ready: bool
    checks: dict[str, bool]


class Load(msgspec.Struct, kw_only=True):
    """Response of /load."""

    server_load: int


class Version(msgspec.Struct, kw_only=True):
    """Response of /version."""

    version: str


class Tokens(msgspec.Struct, kw_only=True):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class NamedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/models/load and /v1/models/unload."""

    model: Annotated[str, about("Name of the model to load or unload.")]
