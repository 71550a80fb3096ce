"""Tools of a request and calls in its history, checked, and as chat templates want them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request

from quire.core.errors import BadRequest
from quire.core.structured import StructuredOutputsParams, renamed_reference
from quire.server.apis.openai.protocol import ChatCompletionRequest, Message
from quire.server.apis.openai.structured_output import OutputShape, shape_of
from quire.server.service import Service
from quire.server.text_generation.output_parsing import OutputParsing
from quire.text.messages.message_grammar import MessageGrammar
from quire.text.structured.answer_checks import AnswerChecks, checks_of

Schemas = dict[str, Mapping[str, Any]]
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class Calling(NamedTuple):
    """What a request says of calls. `schemas`: parameters by functions, None = calls are not read.

    `choice`: the function that must be called, "" = any, None = none must.
    """

    schemas: Schemas | None
    choice: str | None


def calling_of(service: Service, body: ChatCompletionRequest) -> Calling:
    """Read and checked: `BadRequest` names what is wrong."""
    schemas = check_tools(body.tools or ())
    choice, reads = _choice(body, schemas), bool(schemas) and body.tool_choice != "none"
    if reads and choice is None and service.formats.tools is None:
        raise BadRequest(
            "tools: no format of tool calls is known for this model, so none can be read that it makes by itself; give "
            "the server --tool-call-parser, or force calls by tool_choice",
            param="tools",
        )
    return Calling(schemas if reads else None, choice)


async def warn_of_hidden_tools(service: Service, request: Request, body: ChatCompletionRequest) -> None:
    """Have the response's `Warning` header say that the model is not told of the tools that it may call."""
    template = service.template
    if not body.tools or body.tool_choice not in (None, "auto") or template is None:
        return
    if not await asyncio.to_thread(lambda: template.shows_tools):
        request.state.warnings.append(
            "tools: the chat template does not tell the model of tools; force calls by tool_choice, or give the server "
            "--chat-template"
        )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Parameters by the names of functions; `BadRequest` names what is wrong."""
    found: Schemas = {}
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function":
            raise BadRequest(f"{at}.type: only 'function' is offered", param=f"{at}.type")
        if not isinstance(function, dict):
            raise BadRequest(f"{at}.function: required, an object", param=f"{at}.function")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadRequest(
                f"{at}.function.name: must have 1 to 64 letters, digits, _, - or .", param=f"{at}.function.name"
            )
        if name in found:
            raise BadRequest(f"{at}.function.name: {name!r} is there twice", param=f"{at}.function.name")
        if not isinstance(function.get("strict"), bool | None):
            raise BadRequest(f"{at}.function.strict: must be true or false", param=f"{at}.function.strict")
        if schema is not None and not isinstance(schema, dict):
            raise BadRequest(f"{at}.function.parameters: must be a JSON schema", param=f"{at}.function.parameters")
        if renamed_reference(schema):
            told = "$id beside $ref means another thing in each draft of JSON Schema; leave that $id out"
            raise BadRequest(f"{at}.function.parameters: {told}", param=f"{at}.function.parameters")
        found[name] = schema or {}
    return found


def _choice(body: ChatCompletionRequest, schemas: Schemas) -> str | None:
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        told = """must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}"""
        raise BadRequest(f"tool_choice: {told}", param="tool_choice")
    if not schemas:
        raise BadRequest("tool_choice: there are no tools to choose of; give tools", param="tool_choice")
    if name is not None and name not in schemas:
        raise BadRequest(f"tool_choice: {name[:64]!r} is none of tools", param="tool_choice")
    return name or ""


def asked_of(service: Service, body: ChatCompletionRequest, parsing: OutputParsing) -> OutputShape:
    """The shape of an answer: calls that must be made, else what a field asks for, in whose place calls may come.

    Arguments of calls that may be made are as their schemas say if a tool is `strict`.
    """
    formats, shape, tools = parsing.formats, shape_of(body), body.tools if parsing.schemas is not None else None
    written = MessageGrammar(formats.tools, formats.reasoning, parsing.inside, frozenset(service.tokenizer.special))
    if parsing.choice is not None and tools:
        if shape is not None and body.response_format is None:
            raise BadRequest("tool_choice: another shape is asked for already; give one", param="tool_choice")
        return _lark(written.forced(tools, parsing.choice or None, parsing.parallel), _arguments_of(parsing))
    if shape is None:
        strict = any(tool["function"].get("strict") for tool in tools or ())
        if not strict:
            return OutputShape()
        return _lark(written.free(tools or (), parsing.parallel), _arguments_of(parsing))
    checks = replace(checks_of(shape), calls=_arguments_of(parsing))
    return OutputShape(shape, written.around(tools or (), parsing.parallel), checks=checks)


def _arguments_of(parsing: OutputParsing) -> Schemas:
    """Schemas of calls' arguments, which are objects."""
    return {name: {"type": "object", **schema} for name, schema in (parsing.schemas or {}).items()}


def _lark(grammar: str, calls: Schemas) -> OutputShape:
    return OutputShape(StructuredOutputsParams(grammar=grammar), param="tools", checks=AnswerChecks(calls=calls))


def history_calls(message: Message, where: str, as_text: bool) -> list[dict[str, Any]]:
    """A message's calls for the template: arguments as an object, or `as_text`."""
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        at = f"{where}.tool_calls[{i}]"
        if call.type not in (None, "function"):
            raise BadRequest(f"{at}.type: only 'function' is offered", param=f"{at}.type")
        arguments = _arguments(call.function.arguments, f"{at}.function.arguments")
        shown: Any = arguments
        if as_text:
            given = call.function.arguments
            shown = given if isinstance(given, str) and given else msgspec.json.encode(arguments).decode()
        made: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": shown}}
        calls.append(made if call.id is None else {"id": call.id, **made})
    return calls


def _arguments(given: str | dict[str, Any] | None, at: str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given or {}
    if not given:
        return {}
    try:
        value = msgspec.json.decode(given)
    except (ValueError, RecursionError):
        raise BadRequest(f"{at}: is no JSON; send back what the call had", param=at) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{at}: must be a JSON object", param=at)
    return value


def effort_kwargs(service: Service, effort: str | None) -> dict[str, Any]:
    """What a template is told of `reasoning_effort`; `BadRequest` where it cannot act on that."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise BadRequest(f"reasoning_effort: must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
    template = service.template
    known = [name for name in ("enable_thinking", "thinking") if template is not None and template.mentions(name)]
    if template is not None and template.mentions("reasoning_effort"):
        return {"reasoning_effort": effort}
    if not known:
        raise BadRequest("reasoning_effort: this model's chat template knows no such control", param="reasoning_effort")
    return dict.fromkeys(known, effort != "none")
