"""Anthropic's Messages API: its bodies, and the chat completion that each asks for (docs.anthropic.com, "Messages")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.params import MaxTokens
from quire.features.images.edge_image_sources import Base64, ImageSource
from quire.server.apis.fields import RequiredModelField, StreamField, TemperatureField, ToolsField, TopKField, TopPField
from quire.server.apis.openai.protocol import ChatCompletionRequest, FunctionCall, Message, ToolCall
from quire.server.apis.unsupported import refuse_unbuilt
from quire.server.http.errors import brief
from quire.server.service import Service

Content = str | list[dict[str, Any]]
FIELD_NAMES = {"stop": "stop_sequences", "user": "metadata.user_id", "response_format": "output_config.format",
           "reasoning_effort": "output_config.effort"}  # fmt: skip
"""Fields of chat completions by which errors may go, and what they are called here."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`user_id` is a tenant where keys tell nobody apart."""

    user_id: str | None = None


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: Content


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens. Prefixes are cached always, so `cache_control` asks for nothing."""

    model: RequiredModelField
    messages: Annotated[
        list[AnthropicMessage],
        about(
            "The conversation, oldest message first: role (system, user, assistant, tool) and content (text, images)."
        ),
    ]
    system: Annotated[Content | None, about("A system message.")] = None
    tools: ToolsField = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        about("auto, none, required, or a function that must be called. A grammar enforces required calls."),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        about("type enabled or disabled, and budget_tokens, as far as the chat template knows of them."),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, about("format: a JSON schema; effort: as reasoning_effort of chat completions.")
    ] = None
    cache_control: Annotated[Any, about("No effect: prefixes are always cached.")] = None
    mcp_servers: Any = None
    context_management: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Annotated[MaxTokens, about("Largest number of output tokens.")]
    stop_sequences: Annotated[list[str] | None, about("Texts that end the answer.")] = None
    stream: StreamField = None
    temperature: TemperatureField = None
    top_k: TopKField = None
    top_p: TopPField = None
    metadata: Annotated[Metadata | None, about("user_id: who asks, where keys tell nobody apart.")] = None
    service_tier: Any = None
    container: Any = None


def chat_of(service: Service, body: CountRequest) -> ChatCompletionRequest:
    """The chat completion that `body` asks for. `BadRequest` naming the field of `body` that cannot be had."""
    refuse_unbuilt(body)
    messages = list(_messages(body))
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages and messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    fields |= _choice(body.tool_choice) | _output(body.output_config) | _thinking(service, body.thinking)
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        fields |= {name: getattr(body, name) for name in same}
        fields |= {"stop": body.stop_sequences or None, "user": body.metadata and body.metadata.user_id}
    return ChatCompletionRequest(**fields)


def _messages(body: CountRequest) -> Iterator[Message]:
    if body.system:
        yield Message(role="system", content=_text(body.system, "system"))
    if not body.messages:
        raise BadRequest("messages: must not be empty", param="messages")
    for i, message in enumerate(body.messages):
        at = f"messages[{i}]"
        if message.role == "assistant":
            yield _assistant(message.content, f"{at}.content")
        elif message.role == "user":
            yield from _user(message.content, f"{at}.content")
        elif message.role == "system":
            yield Message(role="system", content=_text(message.content, f"{at}.content"))
        else:
            raise BadRequest(f"{at}.role: must be 'user' or 'assistant'", param=f"{at}.role")


def _user(content: Content, at: str) -> Iterator[Message]:
    """Results of tools are messages of their own, and come before what the user says."""
    if isinstance(content, str):
        yield Message(role="user", content=content)
        return
    said = []
    for i, block in enumerate(content):
        if block.get("type") == "tool_result":
            told = block.get("content") or ""
            yield Message(
                role="tool",
                content=_seen(told, f"{at}[{i}].content"),
                tool_call_id=_string(block, "tool_use_id", f"{at}[{i}]"),
            )
        else:
            said.append((i, block))
    if said or not content:
        yield Message(role="user", content=_joined([_part(block, f"{at}[{i}]") for i, block in said]))


def _seen(content: Any, at: str) -> str | list[dict[str, Any]]:
    """The text of text blocks, or parts where there are images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at}: must be a string or a list of blocks", param=at)
    return _joined([_part(block, f"{at}[{i}]") for i, block in enumerate(content)])


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts alone are one."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(block: Any, at: str) -> dict[str, Any]:
    """A block of what is read, as a part of a chat message."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image":
        return {"type": "image", "source": _source(block.get("source"), f"{at}.source")}
    if kind != "text":
        raise BadRequest(f"{at}.type: only text and image can be read here, not {brief(kind)}", param=f"{at}.type")
    return {"type": "text", "text": _string(block, "text", at)}


def _source(source: Any, at: str) -> ImageSource:
    """Where an image is; its bytes leave the body."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return ImageSource(f"{at}.url", _string(source, "url", at))
    if kind != "base64":
        raise BadRequest(f"{at}.type: must be 'base64' or 'url', not {brief(kind)}", param=f"{at}.type")
    if not str(source.get("media_type")).startswith("image/"):
        raise BadRequest(f"{at}.media_type: must be an image's, as image/jpeg", param=f"{at}.media_type")
    data, source["data"] = _string(source, "data", at), ""
    return ImageSource(f"{at}.data", Base64(data))


def _assistant(content: Content, at: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(content):
        where = f"{at}[{i}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                raise BadRequest(f"{where}.type: what Anthropic encrypted cannot be read here", param=f"{where}.type")
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise BadRequest(f"{where}.input: required, an object", param=f"{where}.input")
                function = FunctionCall(name=_string(block, "name", where), arguments=given)
                calls.append(ToolCall(id=_string(block, "id", where), type="function", function=function))
            case _:
                texts.append(_text([block], at, i))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _text(content: Any, at: str, first: int = 0) -> str:
    """The text of text blocks, of which the first is called `at`[`first`]."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at}: must be a string or a list of blocks", param=at)
    texts = []
    for i, block in enumerate(content, first):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            told = f"{at}[{i}].type: only text can be read here, not {brief(kind)}"
            raise BadRequest(told, param=f"{at}[{i}].type")
        texts.append(_string(block, "text", f"{at}[{i}]"))
    return "\n".join(texts)


def _string(block: dict[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{name}: required, a string", param=f"{at}.{name}")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        told = f"{at}.type: only tools of the client's own are offered, not {brief(tool['type'])}"
        raise BadRequest(told, param=f"{at}.type")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{at}.input_schema: required, a JSON schema", param=f"{at}.input_schema")
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


_CHOICES: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    found: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return found | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise BadRequest("tool_choice.type: must be auto, any, tool or none", param="tool_choice.type")
    return found | {"tool_choice": _CHOICES[kind]}


def _output(config: dict[str, Any] | None) -> dict[str, Any]:
    """The shape that the answer is to have, and how much is to be thought."""
    found: dict[str, Any] = {}
    for name, value in (config or {}).items():
        at = f"output_config.{name[:40]}"
        if value is None:
            continue
        if name == "effort":
            found["reasoning_effort"] = "xhigh" if value == "max" else value
        elif name == "format" and isinstance(value, dict) and value.get("type") == "json_schema":
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": value.get("schema")}}
        elif name == "format":
            raise BadRequest(f"{at}.type: must be json_schema", param=f"{at}.type")
        else:
            raise BadRequest(f"{at}: is not known here", param=at)
    return found


SWITCHES: Sequence[str] = ("enable_thinking", "thinking")


def _thinking(service: Service, thinking: dict[str, Any] | None) -> dict[str, Any]:
    """`adaptive` is what a model does by itself; the others need a template that can be told."""
    kind = None if thinking is None else thinking.get("type")
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise BadRequest("thinking.type: must be enabled, adaptive or disabled", param="thinking.type")
    template = service.template
    known = [name for name in SWITCHES if template is not None and template.mentions(name)]
    if kind == "enabled" and service.formats.reasoning is None:
        raise BadRequest("thinking: this model's answers have no known format of reasoning", param="thinking")
    if kind == "disabled":
        return {"include_reasoning": False, "chat_template_kwargs": dict.fromkeys(known, False) or None}
    kwargs: dict[str, Any] = dict.fromkeys(known, True)
    budget = thinking.get("budget_tokens") if thinking is not None else None
    if isinstance(budget, int) and template is not None and template.mentions("thinking_budget"):
        kwargs["thinking_budget"] = budget
    return {"chat_template_kwargs": kwargs or None}
