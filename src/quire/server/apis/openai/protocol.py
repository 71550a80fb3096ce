"""The bodies of requests as strict structs: a wrong type is an error that names the field, and so is an unknown field
where the server is `--strict`; elsewhere `quire.server.apis.unsupported` takes those out before.

`null` means "not given" everywhere, as OpenAI's clients send it. Fields of type `Any` are known to clients but not
built here (`UNBUILT` of `quire.server.apis.unsupported`), or accepted because they cannot change an answer (user,
metadata).
"""

from __future__ import annotations

from typing import Any

import msgspec

Prompt = str | list[str | int | list[int]]
Stop = str | list[str] | None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream says about usage: at its end, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class QuireOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the reply's `quire` is to tell beside identifiers: where the time went, what the prefix cache had, when
    each thing was by this server's clock."""

    timings: bool | None = None
    cache: bool | None = None
    clock: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common; vLLM's extras come after OpenAI's fields, then ours."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    quire: QuireOptions | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    best_of: int | None = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    multi_modal_data: Any = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a message of the history called; `arguments` is JSON, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of such a message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chat message; `content` is text or a list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: list[dict[str, Any]] | None = None
    documents: Any = None

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    echo: Any = None
    mm_processor_kwargs: Any = None


class TokenizeText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize with chat messages: the same fields make the same prompt."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: list[dict[str, Any]] | None = None
    documents: Any = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


ChatBody = ChatCompletionRequest | TokenizeChat
"""What `prompts.encode_chat` reads: msgspec structs cannot share fields through a second base class."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
