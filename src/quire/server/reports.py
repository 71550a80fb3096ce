"""The answer to a body's `quire`: identifiers, where the time went and when, and what the prefix cache had."""

from __future__ import annotations

import time

from msgspec import UNSET

from quire.core.request import Request
from quire.server.api.protocol import QuireOptions
from quire.server.api.replies import PromptReport, Report
from quire.server.generation import Generated


def report(request_id: str, began: float, generation: Generated, asked: QuireOptions) -> Report:
    """What is known of all prompts of a request over HTTP, as far as it was `asked` for.

    `began`: when its head had been read, of `time.monotonic`.
    """

    def of(request: Request) -> PromptReport:
        return PromptReport(
            id=request.id,
            timings=generation.timings(request) if asked.timings else UNSET,
            cache=generation.cache(request) if asked.cache else UNSET,
            clock=generation.moments(request, began, time.monotonic()) if asked.clock else UNSET,
        )

    prompts = [of(request) for request in generation.requests]
    if len(prompts) > 1:
        return Report(request_id=request_id, prompts=prompts)
    one = prompts[0]
    return Report(request_id=request_id, id=one.id, timings=one.timings, cache=one.cache, clock=one.clock)
