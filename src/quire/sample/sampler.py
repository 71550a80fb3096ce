"""Logits rows to tokens and log-probabilities. State is derived from the sequences: none must survive a crash."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from quire.core.request import TokenLogprob
from quire.core.sequence import Sequence, Status
from quire.ops.sampling import DRAW, NOTHING_ALLOWED, PACK_DRAW, QUERY, Floats, Ints, Records, RowEdits
from quire.sample.edits import History, wants_edits

NUMERICS = (
    "the model's logits are not finite numbers (NaN or infinity); the weights or their number format are at fault"
)
NO_TOKEN = "no token may follow: allowed_token_ids, bad_words, logit_bias and min_tokens together exclude every token"
_SEED_MASK = 2**64 - 1


class SamplingOps(Protocol):
    """The ops of a backend that sampling needs (see ops/sampling.py)."""

    def penalize(self, logits: Tensor, edits: Rows[RowEdits]) -> None: ...

    def sample(self, logits: Tensor, draws: Records) -> tuple[Ints, Ints]: ...

    def top_logprobs(self, logits: Tensor, queries: Records, k: int) -> tuple[Records, Ints, Floats]: ...


class LogitRow(NamedTuple):
    """One row of logits: it predicts the token at index `position` of `seq.tokens`.

    With a `target` (the prompt token known to stand there) the row is only scored, for `prompt_logprobs`.
    """

    seq: Sequence
    position: int
    target: int | None = None


class RowResult(NamedTuple):
    """The token of a row (its target if it had one, -1 on error), its log-probability if asked for, or an error."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Query(NamedTuple):
    """A wish for log-probabilities: of `token` and of the `k` best, in row `at` of some logits, for result `row`."""

    row: int
    at: int
    token: int
    k: int


class Sampler:
    """Chooses tokens. A choice depends on nothing but the row's logits, the request, and (seed, position, index).

    Log-probabilities are of the model's own logits, before penalties and temperature (vLLM's `raw_logprobs`).
    """

    def __init__(self, ops: SamplingOps, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._histories: dict[Sequence, History] = {}
        self._history_limit = 64
        self._reserve(64)

    def _reserve(self, rows: int) -> None:
        self._buffer = bytearray(rows * DRAW.itemsize)
        self._draws: Records = np.frombuffer(self._buffer, DRAW)

    def __call__(self, logits: Tensor, rows: Rows[LogitRow]) -> list[RowResult]:
        """Results for `rows`, one per row of logits [R, V] float32 (contiguous, changed in place)."""
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(
                f"logits {tuple(logits.shape)} for {len(rows)} rows and a vocabulary of {self._vocab_size}"
            )
        if len(rows) > len(self._draws):
            self._reserve(2 * len(rows))
        edits: list[RowEdits] = []
        drawn: list[int] = []
        queries: list[Query] = []
        for row, (seq, position, target) in enumerate(rows):
            params = seq.request.params
            if target is not None:
                queries.append(Query(row, row, target, params.prompt_logprobs or 0))
                continue
            PACK_DRAW(
                self._buffer,
                len(drawn) * DRAW.itemsize,
                row,
                max(params.top_k, 0),
                seq.request.seed & _SEED_MASK,
                position,
                seq.index,
                params.temperature,
                params.top_p,
                params.min_p,
            )
            drawn.append(row)
            if wants_edits(seq, position):
                edits.append(self._history(seq).edits(row, position))
        return self._run(logits, rows, edits, drawn, queries)

    def _run(
        self, logits: Tensor, rows: Rows[LogitRow], edits: list[RowEdits], drawn: list[int], queries: list[Query]
    ) -> list[RowResult]:
        """Edit, draw, then score what was asked for; edited rows that want log-probabilities are kept aside."""
        asking = [e.row for e in edits if rows[e.row].seq.request.params.logprobs is not None]
        kept = logits[asking] if asking else logits
        if edits:
            self._ops.penalize(logits, edits)
        results: list[RowResult] = [RowResult(q.token) for q in queries] if not drawn else [RowResult(-1)] * len(rows)
        kept_queries: list[Query] = []
        if drawn:
            tokens, flags = self._ops.sample(logits, self._draws[: len(drawn)])
            edited = {e.row for e in edits}
            for row, token, flag in zip(drawn, tokens.tolist(), flags.tolist(), strict=True):
                if flag:
                    nothing_left = row in edited and flag == NOTHING_ALLOWED
                    results[row] = RowResult(-1, None, NO_TOKEN if nothing_left else NUMERICS)
                    continue
                results[row] = RowResult(token)
                k = rows[row].seq.request.params.logprobs
                if k is not None and row in edited:
                    kept_queries.append(Query(row, asking.index(row), token, k))
                elif k is not None:
                    queries.append(Query(row, row, token, k))
        self._score(logits, queries, results)
        self._score(kept, kept_queries, results)
        return results

    def _score(self, logits: Tensor, queries: list[Query], results: list[RowResult]) -> None:
        """Put the log-probabilities that `queries` ask for into `results`."""
        if not queries:
            return
        most = max(q.k for q in queries)
        records = np.array([(q.at, q.token) for q in queries], QUERY)
        scores, ids, logprobs = self._ops.top_logprobs(logits, records, most)
        for query, score, best, values in zip(queries, scores.tolist(), ids.tolist(), logprobs.tolist(), strict=True):
            _, logprob, rank, flags, _ = score
            if flags:
                results[query.row] = RowResult(-1, None, NUMERICS)
                continue
            top = tuple((i, v) for i, v in zip(best[: query.k], values, strict=False) if i >= 0)
            results[query.row] = RowResult(query.token, TokenLogprob(query.token, logprob, rank, top))

    def _history(self, seq: Sequence) -> History:
        """The sequence's history; those of finished sequences are dropped when the table has doubled."""
        history = self._histories.get(seq)
        if history is None:
            if len(self._histories) >= self._history_limit:
                self._histories = {s: h for s, h in self._histories.items() if s.status != Status.FINISHED}
                self._history_limit = max(64, 2 * len(self._histories))
            history = self._histories[seq] = History(seq)
        return history
