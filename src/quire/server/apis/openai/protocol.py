"""The bodies of requests as strict structs: a wrong type is an error that names the field, and so is an unknown field
where the server is `--strict`; elsewhere `quire.server.apis.unsupported` takes those out before.

`null` means "not given" everywhere, as OpenAI's clients send it. Fields of type `Any` are known to clients but not
built here (`UNBUILT` of `quire.server.apis.unsupported`), or accepted because they cannot change an answer (user,
metadata).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.core.options.fields import about
from quire.core.options.ranges import within
from quire.core.params import Logprobs, MaxTokens, MinTokens, OutputCount
from quire.engine.beam import LengthPenalty
from quire.server.apis.fields import (
    AddGenerationPromptField,
    AddSpecialTokensField,
    CacheSaltField,
    ChatTemplateKwargsField,
    ContinueFinalMessageField,
    FrequencyPenaltyField,
    IgnoreEosField,
    IncludeStopStrInOutputField,
    LogitBiasField,
    MinPField,
    ModelField,
    PresencePenaltyField,
    PriorityField,
    RepetitionPenaltyField,
    ReturnTokenStrsField,
    SeedField,
    SkipSpecialTokensField,
    StreamField,
    StructuredOutputsField,
    SuffixField,
    TemperatureField,
    TimingsPerTokenField,
    ToolChoiceField,
    ToolsField,
    TopKField,
    TopLogprobsField,
    TopPField,
    TruncatePromptTokensField,
    UserField,
)

Prompt = str | list[str | int | list[int]]
Stop = str | list[str] | None
MaxTokensBesideEcho = Annotated[int, within(ge=0, words="must be at least 1, or 0 with echo")]
MAX_TOKENS = about("Largest number of output tokens. The default is 16 for completions; chat may fill the context.")


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

    model: ModelField = None
    max_tokens: Annotated[MaxTokens | None, MAX_TOKENS] = None
    n: Annotated[
        OutputCount | None, about("Number of outputs for each prompt. They share the KV cache of the prompt.")
    ] = None
    temperature: TemperatureField = None
    top_p: TopPField = None
    presence_penalty: PresencePenaltyField = None
    frequency_penalty: FrequencyPenaltyField = None
    logit_bias: LogitBiasField = None
    seed: SeedField = None
    stop: Annotated[Stop, about("Stop strings. They end the output and are not part of it.")] = None
    stream: StreamField = None
    stream_options: Annotated[
        StreamOptions | None, about("include_usage: a last event with usage; continuous_usage_stats: usage in each.")
    ] = None

    user: UserField = None
    metadata: Any = None
    store: Annotated[Any, about("Store the response, so that it can be read and continued later.")] = None
    service_tier: Any = None
    parallel_tool_calls: Annotated[Any, about("Allow several tool calls in one output.")] = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    top_k: TopKField = None
    min_p: MinPField = None
    repetition_penalty: RepetitionPenaltyField = None
    min_tokens: Annotated[
        MinTokens | None, about("Smallest number of tokens before an end token or a stop string may end the output.")
    ] = None
    ignore_eos: IgnoreEosField = None
    stop_token_ids: Annotated[list[int] | None, about("Tokens that end the output.")] = None
    allowed_token_ids: Annotated[list[int] | None, about("Sample only these tokens.")] = None
    bad_words: Annotated[list[str] | None, about("Words that the output must not contain.")] = None
    skip_special_tokens: SkipSpecialTokensField = None
    spaces_between_special_tokens: Annotated[bool | None, about("Put spaces around special tokens in the text.")] = None
    include_stop_str_in_output: IncludeStopStrInOutputField = None
    prompt_logprobs: Annotated[
        Logprobs | None, about("Return logprobs of the prompt's tokens, and of so many most probable ones.")
    ] = None
    truncate_prompt_tokens: TruncatePromptTokensField = None
    add_special_tokens: AddSpecialTokensField = None
    priority: PriorityField = None
    cache_salt: CacheSaltField = None
    request_id: Annotated[str | None, about("The client's own id of the request, for X-Request-Id and the logs.")] = (
        None
    )
    return_token_ids: Annotated[bool | None, about("Return the token ids of prompt and output.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, about("Write tokens in logprobs as token_id:N.")] = None
    quire: Annotated[
        QuireOptions | None,
        about('timings: where the time went; cache: what the prefix cache had (see "Seeing what happened").'),
    ] = None

    response_format: Annotated[Any, about("Structured output: json_object, json_schema or structural_tag.")] = None
    structured_outputs: StructuredOutputsField = None
    guided_json: Annotated[Any, about("A JSON schema; an older name of structured_outputs.")] = None
    guided_regex: Annotated[Any, about("A regular expression; an older name of structured_outputs.")] = None
    guided_choice: Annotated[Any, about("A list of texts; an older name of structured_outputs.")] = None
    guided_grammar: Annotated[Any, about("A grammar (Lark or GBNF); an older name of structured_outputs.")] = None
    grammar: Annotated[Any, about("llama.cpp's: a grammar (GBNF or Lark) that the output must match.")] = None
    json_schema: Annotated[Any, about("llama.cpp's: a JSON schema that the output must match.")] = None
    timings_per_token: TimingsPerTokenField = None
    guided_decoding_backend: Annotated[Any, about("The grammar backend; only guidance is accepted.")] = None
    guided_whitespace_pattern: Annotated[Any, about("Spaces between tokens of JSON, as a regular expression.")] = None
    use_beam_search: Annotated[
        bool | None, about("Find the n most probable outputs by beam search instead of sampling.")
    ] = None
    length_penalty: Annotated[
        LengthPenalty | None, about("Exponent of the length by which beams' log-probabilities are divided.")
    ] = None
    early_stopping: Annotated[bool | str | None, about("Whether beam search ends with the first n finished beams.")] = (
        None
    )
    best_of: Annotated[
        OutputCount | None, about("Number of outputs to generate, of which the n most probable are returned.")
    ] = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    max_tokens: Annotated[MaxTokensBesideEcho | None, MAX_TOKENS] = None
    prompt: Annotated[Prompt, about("Text to continue, token ids, or a list of either; each gets a choice.")]
    echo: Annotated[bool | None, about("Return the prompt before the output, also in logprobs.")] = None
    logprobs: Annotated[
        Logprobs | None, about("Return logprobs. In completions a number: also those of so many most probable tokens.")
    ] = None
    suffix: SuffixField = None
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

    messages: Annotated[
        list[Message],
        about(
            "The conversation, oldest message first: role (system, user, assistant, tool) and content (text, images)."
        ),
    ]
    add_generation_prompt: AddGenerationPromptField = None
    continue_final_message: ContinueFinalMessageField = None
    chat_template_kwargs: ChatTemplateKwargsField = None
    chat_template: Any = None
    tools: ToolsField = None
    documents: Any = None

    max_completion_tokens: Annotated[
        MaxTokens | None, about("As max_tokens, including reasoning. OpenAI prefers this name in chat.")
    ] = None
    logprobs: Annotated[bool | None, about("Log-probabilities of the answer's tokens.")] = None
    top_logprobs: TopLogprobsField = None

    tool_choice: ToolChoiceField = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Annotated[
        str | None,
        about("Effort of reasoning, if the chat template supports it: none, minimal, low, medium, high, xhigh."),
    ] = None
    include_reasoning: Annotated[bool | None, about("Whether reasoning is returned, in reasoning_content.")] = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    echo: Any = None
    mm_processor_kwargs: Any = None


class TokenizeText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize with a text: vLLM's `prompt`, or llama.cpp's `content`."""

    prompt: Annotated[str | None, about("The text.")] = None
    content: Annotated[str | None, about("The text, without special tokens unless add_special; instead of prompt.")] = (
        None
    )
    add_special: Annotated[bool | None, about("As add_special_tokens, for content; the default is false.")] = None
    model: ModelField = None
    add_special_tokens: AddSpecialTokensField = None
    return_token_strs: ReturnTokenStrsField = None


class TokenizeChat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize and /apply-template with chat messages: the same fields make the same prompt."""

    messages: Annotated[
        list[Message],
        about(
            "The conversation, oldest message first: role (system, user, assistant, tool) and content (text, images)."
        ),
    ]
    add_generation_prompt: AddGenerationPromptField = None
    continue_final_message: ContinueFinalMessageField = None
    chat_template_kwargs: ChatTemplateKwargsField = None
    chat_template: Any = None
    tools: ToolsField = None
    documents: Any = None
    model: ModelField = None
    add_special_tokens: AddSpecialTokensField = None
    return_token_strs: ReturnTokenStrsField = None


ChatBody = ChatCompletionRequest | TokenizeChat
"""What `prompts.encode_chat` reads: msgspec structs cannot share fields through a second base class."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: Annotated[list[int], about("Token ids.")]
    model: ModelField = None
