"""Ollama's bodies, and the requests that they ask for (github.com/ollama/ollama, docs/api.md)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.params import MinP, Penalty, RepetitionPenalty, Seed, Temperature, TopK, TopP
from quire.features.images.edge_image_sources import Base64, ImageSource
from quire.server.apis.fields import (
    DimensionsField,
    KeepAliveField,
    ModelField,
    OptionsField,
    RequiredModelField,
    StreamField,
    SuffixField,
    ToolsField,
    TopLogprobsField,
)
from quire.server.apis.openai.protocol import ChatCompletionRequest, CompletionRequest, FunctionCall, Message, ToolCall
from quire.server.apis.openai.tools import EFFORTS
from quire.server.apis.unsupported import refuse_unbuilt, without_effect
from quire.server.service import Service

FIELD_NAMES = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty",
           "response_format": "format", "structured_outputs.json": "format", "reasoning_effort": "think",
           **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop",
                                                   "presence_penalty", "frequency_penalty")}}  # fmt: skip
"""Fields of chat completions by which errors may go, and what they are called here."""


SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
"""Ollama's defaults, for a model that has none."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of Ollama's options; those about memory and threads are the server's here. -1 = no limit."""

    num_predict: int | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Named(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show; `name` is what `model` was called before."""

    model: ModelField = None
    name: Annotated[str | None, about("What model was called before.")] = None
    verbose: Annotated[Any, about("No effect.")] = None


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /api/generate and /api/chat have in common. They stream unless told otherwise."""

    model: RequiredModelField
    stream: StreamField = None
    format: Annotated[Any, about("json, or a JSON schema.")] = None
    options: Annotated[
        Options | None,
        about("Ollama's: num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty and others."),
    ] = None
    think: Annotated[bool | str | None, about("true, false or an effort: whether the model reasons.")] = None
    logprobs: Annotated[
        bool | None, about("Return logprobs. In completions a number: also those of so many most probable tokens.")
    ] = None
    top_logprobs: TopLogprobsField = None
    keep_alive: KeepAliveField = None


class GenerateRequest(OllamaRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate."""

    prompt: Annotated[str | None, about("The text to answer, through the chat template unless raw.")] = None
    system: Annotated[str | None, about("A system message.")] = None
    raw: Annotated[bool | None, about("Continue the prompt without the chat template.")] = None
    suffix: SuffixField = None
    template: Any = None
    context: Any = None
    images: Annotated[
        list[str] | None, about("Images in base64, placed before the text, for models that read images.")
    ] = None


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. `dimensions`: 0 = all."""

    model: RequiredModelField
    input: Annotated[str | list[str] | None, about("A text, token ids, or a list of either; each gets a vector.")] = (
        None
    )
    truncate: Annotated[bool | None, about("Truncate an input that is too long, instead of refusing it.")] = None
    dimensions: DimensionsField = None
    options: OptionsField = None
    keep_alive: KeepAliveField = None


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings."""

    model: RequiredModelField
    prompt: Annotated[str | None, about("The text.")] = None
    options: OptionsField = None
    keep_alive: KeepAliveField = None


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call's; `index` says only which of several it was."""

    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of the history."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(OllamaRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    messages: Annotated[
        list[OllamaMessage] | None,
        about(
            "The conversation, oldest message first: role (system, user, assistant, tool) and content (text, images)."
        ),
    ] = None
    tools: ToolsField = None


def ignored_of(body: OllamaRequest) -> list[str]:
    """Fields that are given and change nothing: models stay until the server ends."""
    return without_effect(body, ("keep_alive",))


def continuation_of(service: Service, body: GenerateRequest) -> CompletionRequest:
    """What a prompt asks for that no template is put around: it is continued as it is, or up to its `suffix`."""
    for name in ("think", "system"):
        if getattr(body, name):
            raise BadRequest(f"{name}: this prompt has no template that could be told", param=name)
    if body.images and body.suffix:
        raise BadRequest("images: cannot be had with suffix; leave one out", param="images")
    fields = _fields(service, body)
    if body.logprobs or body.top_logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    marks = (service.media.mark + "\n") * len(body.images or ())
    return CompletionRequest(**fields, prompt=marks + (body.prompt or ""), suffix=body.suffix)


def chat_of(service: Service, body: GenerateRequest | ChatRequest) -> ChatCompletionRequest:
    """The chat completion that `body` asks for. `BadRequest` naming the field of it that cannot be had."""
    if isinstance(body, ChatRequest):
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
        tools = body.tools or None
    else:
        messages = [Message(role="system", content=body.system)] if body.system else []
        messages.append(Message(role="user", content=_content(body.prompt, sources_of(body.images, "images"))))
        tools = None
    fields = _fields(service, body) | _thinking(service, body.think)
    if body.logprobs or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return ChatCompletionRequest(**fields, messages=messages, tools=tools)


def _fields(service: Service, body: OllamaRequest) -> dict[str, Any]:
    refuse_unbuilt(body)
    given = body.options or Options()
    same = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
    fields: dict[str, Any] = {name: getattr(given, name) for name in same}
    limit = given.num_predict
    fields["repetition_penalty"] = given.repeat_penalty
    found = service.defaults_or(SAMPLING)
    fields |= {name: found[name] for name in SAMPLING if fields[name] is None and name in found}
    return fields | {
        "model": body.model,
        "max_tokens": None if limit in (-1, -2) else limit,
        "seed": None if given.seed == -1 else given.seed,
        **_format(body.format),
        "stream": body.stream is not False,
    }


def _format(shape: Any) -> dict[str, Any]:
    """Fields that ask for the shape. Objects of a schema have no other names than it lists, where it does not say."""
    if shape in (None, ""):
        return {}
    if shape == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(shape, dict):
        joined = b'"allOf"' in msgspec.json.encode(shape)  # objects of several parts, none of which lists all names
        return {"structured_outputs": {"json": shape, "disable_additional_properties": not joined}}
    raise BadRequest('format: must be "json" or a JSON schema', param="format")


def _thinking(service: Service, think: bool | str | None) -> dict[str, Any]:
    """Reasoning is hidden where it is not wanted, and not made where the template can be told so."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in EFFORTS:
        raise BadRequest(f"think: must be true, false or one of {', '.join(EFFORTS)}", param="think")
    template = service.template
    names = ("enable_thinking", "thinking", "reasoning_effort")
    told = template is not None and any(template.mentions(name) for name in names)
    if think and service.formats.reasoning is None and not told:
        raise BadRequest("think: this model has no known format of reasoning", param="think")
    effort = think if isinstance(think, str) else "medium" if think else "none"
    return {"reasoning_effort": effort if told else None, "include_reasoning": bool(think)}


def sources_of(images: list[str] | None, at: str) -> list[ImageSource]:
    """The images of a field, which leave the body; they are base64 without a URL around it."""
    found = [ImageSource(f"{at}[{i}]", Base64(text)) for i, text in enumerate(images or ())]
    if images is not None:
        images[:] = [""] * len(images)
    return found


def _content(text: str | None, sources: list[ImageSource]) -> str | list[dict[str, Any]]:
    """Images come before what is said of them, as there."""
    if not sources:
        return text or ""
    image_parts: list[dict[str, Any]] = [{"type": "image", "source": source} for source in sources]
    return [*image_parts, {"type": "text", "text": text or ""}]


def _message(message: OllamaMessage, at: str) -> Message:
    refuse_unbuilt(message, where=f"{at}.")
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.function.name, arguments=call.function.arguments or {}))
        for call in message.tool_calls or ()
    ]
    return Message(
        role=message.role,
        content=_content(message.content, sources_of(message.images, f"{at}.images")),
        reasoning_content=message.thinking,
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )
