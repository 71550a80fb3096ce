"""The shape that a body asks of its answer, by any of the names there are for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from quire.core.errors import BadRequest, Overloaded
from quire.core.request import Request
from quire.core.structured import KINDS, StructuredOutputsParams, structured
from quire.engine.requests import add_grammar, ask_grammar
from quire.server.apis.openai.protocol import SamplingFields
from quire.server.http.errors import brief
from quire.server.service import Service
from quire.text.structured.answer_checks import NO_CHECKS, AnswerChecks
from quire.text.structured.grammar_reader import PATIENCE, SECONDS

_GUIDED = ("json", "regex", "choice", "grammar")
_LLAMA_CPP = {"json_schema": "json", "grammar": "grammar"}
"""llama.cpp's fields -> what they are of `structured_outputs`."""
_BACKENDS = ("auto", "guidance")
_ASKING = ThreadPoolExecutor(2, "quire-asking")
"""Where what is asked is written down, which takes no long time; who waits for a grammar holds no thread."""


class OutputShape(NamedTuple):
    """What shape an answer is to have, and the Lark that stands around it ("" = none, see `WeightReader.read`).

    `param`: the field that asks for it, "" = one of those that `shape_of` reads. `checks`: what it is checked by.
    """

    shape: StructuredOutputsParams | None = None
    frame: str = ""
    param: str = ""
    checks: AnswerChecks = NO_CHECKS


def shape_of(body: SamplingFields) -> StructuredOutputsParams | None:
    """What `response_format`, `structured_outputs` or a `guided_` field asks for; None: any text will do.

    `BadRequest` when several do, or one asks for what is no shape.
    """
    found = _asked(body)
    if not found:
        if body.guided_whitespace_pattern is not None:
            raise BadRequest("guided_whitespace_pattern: needs guided_json", param="guided_whitespace_pattern")
        return None
    if len(found) > 1:
        field = found[1][0]
        raise BadRequest(f"{field}: {found[0][0]} asks for a shape already; give one", param=field)
    field, value = found[0]
    if not isinstance(value, dict):
        raise BadRequest(f"{field}: must be an object", param=field)
    with named(body):
        shape = structured(value)
        assert isinstance(shape, StructuredOutputsParams) and shape.kind
    return shape


def _asked(body: SamplingFields) -> list[tuple[str, Any]]:
    """Fields that ask for a shape, each with what it would be as `structured_outputs`."""
    backend = body.guided_decoding_backend
    if backend is not None and backend not in _BACKENDS:
        message = f"guided_decoding_backend: grammars are read by guidance here, not by {brief(backend)}"
        raise BadRequest(f"{message}; leave it out", param="guided_decoding_backend")
    spaces = {} if body.guided_whitespace_pattern is None else {"whitespace_pattern": body.guided_whitespace_pattern}
    found = [(f"guided_{kind}", {kind: value} | spaces) for kind in _GUIDED
             if (value := getattr(body, f"guided_{kind}")) is not None]  # fmt: skip
    found += [(name, {kind: value}) for name, kind in _LLAMA_CPP.items()
              if (value := getattr(body, name)) not in (None, "")]  # fmt: skip
    if body.structured_outputs is not None:
        found.insert(0, ("structured_outputs", body.structured_outputs))
    if body.response_format is not None and (made := _format(body.response_format)) is not None:
        found.insert(0, ("response_format", made))
    return found


def _format(value: Any) -> dict[str, Any] | None:
    """OpenAI's `response_format`, and vLLM's structural tags in it; None: text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            param = "response_format.json_schema.schema"
            raise BadRequest(f"{param}: required, and missing", param=param)
        return {"json": schema} | ({"strict": True} if inner.get("strict") is True else {})
    if kind == "structural_tag":
        return {"structural_tag": {name: item for name, item in value.items() if name != "type"}}
    raise BadRequest(
        "response_format: its type must be text, json_object, json_schema or structural_tag", param="response_format"
    )


@contextlib.contextmanager
def named(body: SamplingFields, param: str = "") -> Iterator[None]:
    """Errors about a shape name the field of `body` that asked for it, which is `param` if that is given."""
    try:
        yield
    except BadRequest as error:
        told = error.param or ""
        if told == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
            own = "max_completion_tokens"
        elif told.split(".")[0] != "structured_outputs":
            raise
        else:
            own = param or _own_name(body, told.removeprefix("structured_outputs").lstrip("."))
        raise BadRequest(error.about(own), param=own) from None


def _own_name(body: SamplingFields, kind: str) -> str:
    if body.response_format is not None and _format(body.response_format) is not None:
        if kind != "json":
            return "response_format"
        plain = body.response_format["type"] == "json_object"
        return "response_format.schema" if plain else "response_format.json_schema.schema"
    for name, own in _LLAMA_CPP.items():
        if getattr(body, name) not in (None, "") and kind in (own, ""):
            return name
    if body.structured_outputs is None and kind in KINDS:
        return f"guided_{kind}"
    return f"structured_outputs.{kind}" if kind else "structured_outputs"


async def with_grammars(
    service: Service, body: SamplingFields, asked: OutputShape, requests: list[Request]
) -> list[Request]:
    """`requests` with the grammar of what they ask, read in other processes, each tenant in its turn.

    `Overloaded` where that takes longer than `PATIENCE`; what was begun goes on, and is known to the next that asks.
    """
    if asked.shape is None:
        return requests
    end = asyncio.get_running_loop().time() + PATIENCE
    return [await _with_grammar(service, body, asked, each, end) for each in requests]


async def _with_grammar(
    service: Service, body: SamplingFields, asked: OutputShape, request: Request, end: float
) -> Request:
    with named(body, asked.param):
        try:
            return await _read(service, request, asked.frame, end)
        except BadRequest as error:
            if not asked.frame or error.param == "max_tokens":
                raise
            await _read(service, request, "", end)  # where the shape is not at fault, what stands around it is: tools
            raise BadRequest(error.about("tools"), param="tools") from None


async def _read(service: Service, request: Request, frame: str, end: float) -> Request:
    loop, size = asyncio.get_running_loop(), service.engine.info.vocab_size
    reading = await loop.run_in_executor(_ASKING, ask_grammar, size, service.tokenizer, request, frame)
    assert reading is not None, "its shape was looked at"
    try:
        async with asyncio.timeout_at(end):
            return add_grammar(request, await asyncio.wrap_future(reading))
    except TimeoutError:
        told = f"its grammar was not read within {PATIENCE:g} s, as others are before it; try again in {SECONDS:g} s"
        raise Overloaded(told, retry_after=math.ceil(SECONDS)) from None
