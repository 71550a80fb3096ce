"""How a sequence grows by what a step found, and when it ends."""

from __future__ import annotations

from quire.core.blame import of_request
from quire.core.errors import QuireError
from quire.core.plan import Chunk, ChunkResult
from quire.core.request import FinishReason, Output, Request
from quire.core.sequence import Sequence, Status
from quire.features.feature import SchedulerFeature
from quire.features.pooling.plan_pooling import finish


class PromptLogprobs(SchedulerFeature):
    """Prompts whose tokens want log-probabilities: once, whoever of its siblings computes the prompt again."""

    def concerns(self, request: Request) -> bool:
        """One that asks for them."""
        return request.params.prompt_logprobs is not None

    def logits(self, seq: Sequence, count: int) -> int:
        """All rows that are still to be scored."""
        wants = seq.request.params.prompt_logprobs is not None and seq.index == 0
        return count if wants and len(seq.prompt_logprobs) < seq.prompt_len - 1 else 0


def append(chunk: Chunk, result: ChunkResult, output: Output, now: float) -> FinishReason | None:
    """Append new tokens up to the first that ends the sequence, and fill `output`; what the request alone is to blame
    for becomes the result's `error`, and where that has one nothing is done."""
    if result.error is not None:
        return None
    pooled = chunk.seq.request.pooling is not None
    try:
        return (finish if pooled else _append)(chunk, result, output, now)
    except BaseException as error:
        if not pooled and chunk.seq.guide is None:
            raise
        result.error = of_request(error, "pooling" if pooled else "grammar")
        return None


def _append(chunk: Chunk, result: ChunkResult, output: Output, now: float) -> FinishReason | None:
    seq, draft = chunk.seq, chunk.seq.draft
    scored = seq.request.params.prompt_logprobs is not None and seq.index == 0
    if scored:
        seq.prompt_logprobs += result.prompt_logprobs[max(0, len(seq.prompt_logprobs) - chunk.start) :]
    reason: FinishReason | None = None
    for token in result.tokens:
        if not output.tokens and len(seq.tokens) == seq.prompt_len:
            seq.times.first_token = seq.times.last_token = now
            output.timing, output.miss = seq.timing, seq.kv.miss
            if scored:
                output.prompt_logprobs = seq.prompt_logprobs
        seq.tokens.append(token)
        output.tokens.append(token)
        reason = _end_reason(seq, token)
        if reason is not None:
            output.complete = reason == "stop" and _complete(seq)
            break
    if output.tokens:
        seq.times.last_token = now
        seq.in_flight -= 1
        output.logprobs = result.logprobs[: len(output.tokens)]
        output.preemptions = seq.times.preemptions
    if draft.tokens:
        draft.drafted += len(draft.tokens)
        draft.accepted += max(0, len(result.tokens) - 1)
        output.drafted, output.accepted = draft.drafted, draft.accepted
        seq.computed, draft.tokens = len(seq.tokens) - 1, []
    return reason


def begun(siblings: list[Sequence]) -> list[Sequence]:
    """The sequences of a request that wait at first: one, of which the others fork once its prompt is computed.

    A request that goes on behind what an engine that died had put out has all that go on, each by itself.
    """
    waiting = siblings[:1]
    if siblings and (emitted := siblings[0].request.emitted):
        waiting = [seq for seq in siblings if emitted[seq.index] is not None]
        for seq in siblings:
            seq.tokens += emitted[seq.index] or ()
    return waiting


def pending(siblings: list[Sequence]) -> list[Sequence]:
    """Siblings that wait for the prompt of another to be computed."""
    return [seq for seq in siblings if seq.status is Status.PENDING]


def orphans(siblings: list[Sequence]) -> list[Sequence]:
    """The sequence that waits in the place of one that ended before the others of its request forked from it."""
    return begun(pending(siblings)) if all(seq.status in (Status.PENDING, Status.FINISHED) for seq in siblings) else []


def moves(seq: Sequence, path: list[int], block_size: int) -> list[tuple[int, int, int]]:
    """Slots (source, destination, table) of kept nodes that lie where a node of another branch was to be."""
    if not path:
        return []
    first, moved = len(seq.tokens), [(node, place) for place, node in enumerate(path) if node != place]

    def slot(table: list[int], position: int) -> int:
        return table[position // block_size] * block_size + position % block_size

    return [
        (slot(table, first + node), slot(table, first + place), number)
        for number, table in enumerate(seq.kv.blocks)
        for node, place in moved
    ]


def _end_reason(seq: Sequence, token: int) -> FinishReason | None:
    params = seq.request.params
    if len(seq.tokens) - seq.prompt_len >= params.min_tokens:
        if token in params.stop_token_ids:
            seq.stop_token = token
            return "stop"
        if not params.ignore_eos and token in seq.request.eos_token_ids:
            return "stop"
    if seq.guide is not None and _complete(seq):
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None


def _complete(seq: Sequence) -> bool:
    """Whether nothing may follow by its grammar."""
    return seq.guide is not None and seq.guide.complete(len(seq.tokens) - seq.prompt_len)


def ended(seq: Sequence, error: QuireError | None = None) -> Output:
    """The output of a sequence that ended without another token."""
    output = Output(
        request_id=seq.request.id,
        index=seq.index,
        finish_reason=seq.finish_reason,
        preemptions=seq.times.preemptions,
        timing=seq.timing,
    )
    return output if error is None else output.fail(error)
