"""Tools of a request and calls in its history, checked, and as chat templates want them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.errors import BadRequest
from quire.server.api.protocol import Message
from quire.server.service import Service

Schemas = dict[str, Mapping[str, Any]]
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def check_tools(service: Service, tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Parameters by the names of functions; `BadRequest` names what is wrong."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools: {len(tools)} are more than {MAX_TOOLS}", param="tools")
    if tools and service.formats.tools is None:
        raise BadRequest(
            "tools: no format of tool calls is known for this model; the server needs --tool-call-parser",
            param="tools",
        )
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
        if schema is not None and not isinstance(schema, dict):
            raise BadRequest(f"{at}.function.parameters: must be a JSON schema", param=f"{at}.function.parameters")
        found[name] = schema or {}
    return found


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
