"""The shapes of the Responses API: a response of items, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.errors import QuireError
from quire.core.request import TokenLogprob, random_id
from quire.server.apis.message_answer import Block, BlockChange, MessageAnswer, named_event
from quire.server.apis.openai.logprobs import LogprobWriter
from quire.server.apis.openai.responses_bodies import Item, ResponsesRequest
from quire.server.http.dialects import RESPONSES
from quire.server.service import Service
from quire.server.text_generation.generation import Generated
from quire.server.text_generation.output_parsing import OutputParsing
from quire.server.text_generation.reports import Report

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class ResponseReply(msgspec.Struct, kw_only=True):
    """Response of /v1/responses; `output` has the items reasoning, message and function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: dict[str, Any] | None
    user: Any
    quire: Report | UnsetType = UNSET


class ResponseAnswer(MessageAnswer):
    """`status`: in_progress, completed, incomplete, failed or cancelled. Events are numbered from 0."""

    dialect = RESPONSES

    def __init__(
        self, service: Service, generation: Generated, parsing: OutputParsing, body: ResponsesRequest, store: bool
    ) -> None:
        super().__init__(service, generation, parsing, model=service.answering(body.model), stream=bool(body.stream))
        self.id = f"resp_{random_id()}"
        self.status = "in_progress"
        self.error: QuireError | None = None
        self._body, self._store = body, store
        self._created = int(time.time())
        self._names = LogprobWriter(service.tokenizer, as_ids=False)
        self._ids: list[str] = []
        self._waiting: list[TokenLogprob] = []
        self._number = 0

    def opening(self) -> bytes:
        """The response without its output."""
        empty = self.whole()
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def message(self, steps: Iterable[BlockChange], logprobs: list[TokenLogprob]) -> bytes:
        """The events of each step."""
        self._waiting += logprobs
        made = {"begin": self._begins, "gain": self._gains, "end": self._ends}
        return b"".join(made[step.what](step) for step in steps)

    def closing(self) -> bytes:
        """The whole response."""
        self.finish()
        return self._event(f"response.{self.status}", response=self.whole())

    def failed(self, error: QuireError) -> bytes:
        """The response, and why it is none."""
        self.status, self.error = "failed", error
        return self._event("response.failed", response=self.whole())

    def finish(self) -> None:
        """All was said."""
        self.status = "completed" if self.finish_reason == "stop" else "incomplete"

    def output(self) -> list[Item]:
        """All items as far as they have come."""
        last = len(self.blocks.all) - 1
        done = "completed" if self.status == "completed" else "incomplete" if self.finish_reason else "in_progress"
        return [self._item(i, block, done if i == last else "completed") for i, block in enumerate(self.blocks.all)]

    def whole(self) -> ResponseReply:
        """The response as far as it has come."""
        body = self._body
        params = self.generation.requests[0].params
        cut = self.status == "incomplete"
        error = None if self.error is None else {"code": "server_error", "message": self.error.message}
        reasoning = body.reasoning
        return ResponseReply(
            id=self.id,
            created_at=self._created,
            status=self.status,
            background=bool(body.background),
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.model,
            output=self.output(),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": reasoning and reasoning.effort, "summary": None},
            store=self._store,
            temperature=params.temperature,
            text={"format": (body.text and body.text.format) or {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=params.top_p,
            usage=None if self.status == "in_progress" else self._usage(),
            user=body.user,
            quire=self.verdict,
        )

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens or 0},
            "total_tokens": usage.total_tokens,
        }

    def _item(self, index: int, block: Block, status: str) -> Item:
        while len(self._ids) <= index:
            self._ids.append(random_id())
        item = {"id": f"{_PREFIXES[block.kind]}_{self._ids[index]}"}
        if block.kind == "call":
            item |= {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "status": status}
        part = self._part(block) if block.text else None
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [part] if part else [], "status": status}
        return {**item, "type": "message", "role": "assistant", "content": [part] if part else [], "status": status}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._entries(self.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _entries(self, items: list[TokenLogprob]) -> list[Any]:
        return list(self._names.chat(items, self._body.top_logprobs or 0).content)

    def _begins(self, step: BlockChange) -> bytes:
        item = self._item(step.index, Block(step.block.kind, id=step.block.id, name=step.block.name), "in_progress")
        said = self._event("response.output_item.added", output_index=step.index, item=item)
        if step.block.kind == "call":
            return said
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if step.block.kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return said + self._event("response.content_part.added", **self._place(step), part=part)

    def _gains(self, step: BlockChange) -> bytes:
        if step.block.kind == "call":
            return self._event("response.function_call_arguments.delta", **self._place(step), delta=step.text)
        if step.block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(step), delta=step.text)
        entries, self._waiting = self._entries(self._waiting), []
        return self._event("response.output_text.delta", **self._place(step), delta=step.text, logprobs=entries)

    def _ends(self, step: BlockChange) -> bytes:
        block, place = step.block, self._place(step)
        told: dict[str, Any] = {} if block.kind == "call" else {"part": self._part(block)}
        if block.kind == "call":
            said = self._event("response.function_call_arguments.done", **place, name=block.name, arguments=block.text)
        elif block.kind == "reasoning":
            said = self._event("response.reasoning_text.done", **place, text=block.text)
        else:
            entries = told["part"]["logprobs"]
            said = self._event("response.output_text.done", **place, text=block.text, logprobs=entries)
        if told:
            said += self._event("response.content_part.done", **place, **told)
        item = self._item(step.index, block, "incomplete" if self.finish_reason == "length" else "completed")
        return said + self._event("response.output_item.done", output_index=step.index, item=item)

    def _place(self, step: BlockChange) -> dict[str, Any]:
        item = self._item(step.index, Block(step.block.kind), "")
        place = {"item_id": item["id"], "output_index": step.index}
        return place if step.block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, sequence_number=number, **fields)
