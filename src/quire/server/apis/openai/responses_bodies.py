"""OpenAI's Responses API: its body, its items, and the chat completion that they ask for
(platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.params import MaxTokens
from quire.features.images.edge_image_sources import DETAILS, ImageSource
from quire.server.apis.fields import (
    CacheSaltField,
    ChatTemplateKwargsField,
    FrequencyPenaltyField,
    IgnoreEosField,
    IncludeStopStrInOutputField,
    LogitBiasField,
    MinPField,
    ModelField,
    PresencePenaltyField,
    PriorityField,
    RepetitionPenaltyField,
    SeedField,
    SkipSpecialTokensField,
    StreamField,
    StructuredOutputsField,
    TemperatureField,
    ToolChoiceField,
    TopKField,
    TopLogprobsField,
    TopPField,
    UserField,
)
from quire.server.apis.openai.protocol import ChatCompletionRequest, FunctionCall, Message, ToolCall
from quire.server.apis.unsupported import refuse_unbuilt, without_effect
from quire.server.http.errors import brief

Item = dict[str, Any]
FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format",
           "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}  # fmt: skip
"""Fields of chat completions by which errors may go, and what they are called here."""
LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_SAME = ("model", "temperature", "top_p", "top_logprobs", "user", "parallel_tool_calls", "stream", "top_k", "min_p",
         "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "cache_salt",
         "structured_outputs", "chat_template_kwargs", "logit_bias", "ignore_eos", "skip_special_tokens",
         "include_stop_str_in_output")  # fmt: skip
_SILENT = ("service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`effort`: see `reasoning_effort` of chat completions. Reasoning is shown whole, so nobody sums it up."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Usage comes with the last event always."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses; what vLLM adds comes after OpenAI's fields."""

    input: Annotated[str | list[Item], about("A text, or a list of items: messages, calls and their results.")]
    model: ModelField = None
    instructions: Annotated[str | None, about("A system message before the input.")] = None
    max_output_tokens: Annotated[MaxTokens | None, about("Largest number of output tokens, including reasoning.")] = (
        None
    )
    temperature: TemperatureField = None
    top_p: TopPField = None
    top_logprobs: TopLogprobsField = None
    include: Annotated[list[str] | None, about("What else the reply has: message.output_text.logprobs.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, about("Functions that the model may call; the server itself calls none.")
    ] = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[bool | None, about("Allow several tool calls in one output.")] = None
    text: Annotated[
        TextOptions | None, about("format: the shape of the answer, as response_format of chat completions.")
    ] = None
    reasoning: Annotated[ReasoningOptions | None, about("effort: as reasoning_effort of chat completions.")] = None
    previous_response_id: Annotated[str | None, about("Continue from this stored response.")] = None
    store: Annotated[bool | None, about("Store the response, so that it can be read and continued later.")] = None
    background: Annotated[
        bool | None, about("Reply at once with an id. Get the response from GET /v1/responses/{id}.")
    ] = None
    stream: StreamField = None
    stream_options: Annotated[
        ResponseStreamOptions | None,
        about("include_usage: a last event with usage; continuous_usage_stats: usage in each."),
    ] = None
    metadata: Annotated[dict[str, str] | None, about("Up to 16 texts by name, which come back with the response.")] = (
        None
    )
    user: UserField = None
    truncation: Annotated[str | None, about("Only disabled: a prompt that is too long is refused.")] = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Annotated[
        Any, about("Ignored: it cannot change the output. The Warning header names it.")
    ] = None
    safety_identifier: Any = None
    conversation: Any = None
    prompt: Annotated[Any, about("Refused: prompts are not kept; send instructions and input.")] = None
    max_tool_calls: Any = None

    top_k: TopKField = None
    min_p: MinPField = None
    seed: SeedField = None
    stop: Annotated[str | list[str] | None, about("Stop strings. They end the output and are not part of it.")] = None
    presence_penalty: PresencePenaltyField = None
    frequency_penalty: FrequencyPenaltyField = None
    repetition_penalty: RepetitionPenaltyField = None
    priority: PriorityField = None
    cache_salt: CacheSaltField = None
    structured_outputs: StructuredOutputsField = None
    chat_template_kwargs: ChatTemplateKwargsField = None
    logit_bias: LogitBiasField = None
    ignore_eos: IgnoreEosField = None
    skip_special_tokens: SkipSpecialTokensField = None
    include_stop_str_in_output: IncludeStopStrInOutputField = None


def ignored_of(body: ResponsesRequest) -> list[str]:
    """Fields that are given and change nothing."""
    found = without_effect(body, _SILENT)
    found += _details_of(items_of(body))
    found += [f"include[{i}]" for i, name in enumerate(body.include or ()) if name != LOGPROBS]
    if body.reasoning is not None:
        found += [f"reasoning.{name}" for name in without_effect(body.reasoning, ("summary", "generate_summary"))]
    return found


def _details_of(items: Sequence[Item]) -> list[str]:
    """Fields of images that ask for a size of their own: the model's files say what becomes of them."""
    found = []
    for i, item in enumerate(items):
        content = item.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            image = part if isinstance(part, dict) and part.get("type") == "input_image" else {}
            if image.get("detail") not in (None, "auto"):
                found.append(f"input[{i}].content[{j}].detail")
    return found


def items_of(body: ResponsesRequest) -> list[Item]:
    """What `input` gives; a text is what the user says."""
    given = body.input
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def chat_of(body: ResponsesRequest, before: Sequence[Item]) -> ChatCompletionRequest:
    """The chat completion that `body` asks for, behind the items that came `before`.

    `BadRequest` naming the field of `body` that cannot be had.
    """
    refuse_unbuilt(body)
    if body.stream_options is not None:
        refuse_unbuilt(body.stream_options, where="stream_options.")
    if body.prompt is not None:
        raise BadRequest("prompt: prompts are not kept; send instructions and input", param="prompt")
    if body.truncation not in (None, "disabled"):
        raise BadRequest("truncation: what is too long is refused; only 'disabled' is offered", param="truncation")
    messages = messages_of(before, items_of(body))
    if body.instructions:
        messages.insert(0, Message(role="system", content=body.instructions))
    logprobs = body.top_logprobs or (LOGPROBS in (body.include or ()))
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.text is not None:
        fields["response_format"] = _format(body.text.format)
        fields["verbosity"] = None if body.text.verbosity == "medium" else body.text.verbosity
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return ChatCompletionRequest(
        **fields,
        messages=messages,
        max_tokens=body.max_output_tokens,
        tool_choice=_choice(body.tool_choice),
        logprobs=True if logprobs else None,
    )


def messages_of(before: Sequence[Item], given: Sequence[Item]) -> list[Message]:
    """Items as messages: what the assistant thought, said and called in one turn is one. `given` came as `input`."""
    turns = _Turns()
    for item in before:
        turns.add(item, "previous_response_id")
    for i, item in enumerate(given):
        turns.add(item, f"input[{i}]")
    turns.end()
    return turns.messages


class _Turns:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._said: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, item: Item, at: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, at)
            case "reasoning":
                if self._said or self._calls:
                    self.end()
                self._thoughts.append(_text(item.get("content") or item.get("summary") or "", f"{at}.content"))
            case "function_call":
                function = FunctionCall(name=_string(item, "name", at), arguments=_string(item, "arguments", at))
                self._calls.append(ToolCall(id=_string(item, "call_id", at), type="function", function=function))
            case "function_call_output":
                self.end()
                told = _seen(item.get("output", ""), f"{at}.output")
                self.messages.append(Message(role="tool", content=told, tool_call_id=_string(item, "call_id", at)))
            case _:
                told = f"{at}.type: {brief(kind)} is no item that can be read here"
                raise BadRequest(told, param=f"{at}.type")

    def _message(self, item: Item, at: str) -> None:
        role, content = _string(item, "role", at), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            raise BadRequest(f"{at}.role: must be user, assistant, system or developer", param=f"{at}.role")
        if role != "assistant" or self._said or self._calls:
            self.end()
        if role == "assistant":
            self._said.append(_text(content, f"{at}.content"))
        else:
            # Few templates know the role of a developer.
            said = _seen(content, f"{at}.content")
            self.messages.append(Message(role="system" if role == "developer" else role, content=said))

    def end(self) -> None:
        if self._thoughts or self._said or self._calls:
            reasoning = "\n".join(self._thoughts) or None
            text, calls = "".join(self._said), self._calls or None
            self.messages.append(Message(role="assistant", content=text, reasoning_content=reasoning, tool_calls=calls))
        self._thoughts, self._said, self._calls = [], [], []


def _seen(content: Any, at: str) -> str | list[Item]:
    """The text of a content, or parts of a chat message where there are images."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts):
        return _text(content, at)
    return [_part(part, f"{at}[{i}]") for i, part in enumerate(parts)]


def _part(part: Any, at: str) -> Item:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return {"type": "text", "text": _text_of(part, at)}
    if part.get("file_id") is not None:
        raise BadRequest(f"{at}.file_id: files are not kept here; send image_url", param=f"{at}.file_id")
    if part.get("detail") not in DETAILS:
        raise BadRequest(f"{at}.detail: must be auto, low or high", param=f"{at}.detail")
    return {"type": "image", "source": ImageSource(f"{at}.image_url", _string(part, "image_url", at))}


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at}: required, a string or a list of parts", param=at)
    return "\n".join(_text_of(part, f"{at}[{i}]") for i, part in enumerate(content))


def _text_of(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS:
        raise BadRequest(f"{at}.type: only text can be read here, not {brief(kind)}", param=f"{at}.type")
    return _string(part, "text", at)


def _string(item: Item, name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{name}: required, a string", param=f"{at}.{name}")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        told = f"{at}.type: only 'function' is offered, not {brief(tool.get('type'))}"
        raise BadRequest(told, param=f"{at}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    """A function is named inside of `function` by chat completions, and beside `type` here."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(shape: dict[str, Any] | None) -> dict[str, Any] | None:
    if shape is None or shape.get("type") != "json_schema":
        return shape
    return {"type": "json_schema", "json_schema": {name: value for name, value in shape.items() if name != "type"}}
