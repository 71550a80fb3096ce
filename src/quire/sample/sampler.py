"""Logits rows to tokens and log-probabilities. State is derived from the sequences: none must survive a crash."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import Failed, fail
from quire.core.errors import BadRequest, NumericError, QuireError
from quire.core.plan import LogitRow
from quire.core.request import TokenLogprob
from quire.core.sequence import Sequence, Status
from quire.features.structured_output.run_grammar_masks import MaskBuilder, settle
from quire.ops.arrays import Array
from quire.ops.philox import noise
from quire.ops.sampling import (
    DRAW,
    GREEDY_BELOW,
    NOTHING_ALLOWED,
    PACK_DRAW,
    QUERY,
    SCORE,
    Found,
    Ints,
    Records,
    RowEdits,
)
from quire.sample.logit_edits import LogitEdits
from quire.sample.speech_rules import mask_of

NUMERICS = NumericError(
    "the model's logits are not finite numbers (NaN or infinity); the weights or their number format are at fault"
)
NO_TOKEN = BadRequest(
    "no token may follow: allowed_token_ids, bad_words, logit_bias and min_tokens together exclude every token"
)
_SEED_MASK = 2**64 - 1


class SamplingOps(Protocol):
    """The ops of a backend that sampling needs (see ops/sampling.py)."""

    def penalize(self, logits: Array, edits: GenericSequence[RowEdits]) -> None: ...

    def sample(self, logits: Array, draws: Records) -> tuple[Found, Found]: ...

    def top_logprobs(
        self, logits: Array, queries: Records, k: int, drawn: Found | None
    ) -> tuple[Found, Found, Found]: ...

    def host(self, array: Any) -> NDArray[Any]: ...

    def fetch(self, found: GenericSequence[Found]) -> Callable[[], list[NDArray[Any]]]: ...


class RowResult(NamedTuple):
    """The token of a row (its target if it had one, -1 on error), its log-probability if asked for, or an error."""

    token: int
    logprob: TokenLogprob | None = None
    error: QuireError | None = None


class LogprobQuery(NamedTuple):
    """A wish for log-probabilities: of `token` and of the `k` best, in row `at` of some logits, for result `row`.

    A `token` of -1 - i is the one that row `drawn[i]` gives.
    """

    row: int
    at: int
    token: int
    k: int


class SamplingWork(NamedTuple):
    """What is asked of some rows: `drawn`, those that want a token; those that are `edited`; log-probabilities.

    `scored` are of the logits as they come out of the sampler, `raw` of copies of edited rows, as they came in.
    `failed`: sequences that end with an error, whose rows are drawn all the same, as places of rows are known.
    """

    drawn: list[int]
    edited: set[int]
    scored: list[LogprobQuery]
    raw: list[LogprobQuery]
    failed: Failed


class Drawn:
    """What rows of logits gave, perhaps not yet: the device may still be at work.

    `tokens` int32 [n] lie where the logits do: those of the rows without a target, in order, -1 where one is broken.
    `failed`: sequences whose own part of it failed; their rows give no token. More may join by `results`.
    """

    def __init__(
        self, rows: GenericSequence[LogitRow], work: SamplingWork, found: list[Found], ops: SamplingOps
    ) -> None:
        self.tokens = found[0] if work.drawn else None
        self.failed = work.failed
        self._rows, self._work, self._wait = rows, work, ops.fetch(found)

    def results(self) -> list[RowResult]:
        """One result per row, once the device has them."""
        arrays, work = iter(self._wait()), self._work
        results = [RowResult(-1)] * len(self._rows)
        if work.drawn:
            tokens, flags = next(arrays), next(arrays)
            for row, token, flag in zip(work.drawn, tokens.tolist(), flags.tolist(), strict=True):
                nothing_left = row in work.edited and flag == NOTHING_ALLOWED
                results[row] = RowResult(token, None, (NO_TOKEN if nothing_left else NUMERICS) if flag else None)
        for queries in (work.scored, work.raw):
            if queries:
                self._score(queries, [next(arrays) for _ in range(3)], results)
        if self.failed:
            for i, (seq, *_) in enumerate(self._rows):
                if seq in self.failed:
                    results[i] = RowResult(-1, None, self.failed[seq])
        return results

    def _score(self, queries: list[LogprobQuery], found: list[NDArray[Any]], results: list[RowResult]) -> None:
        """Put the log-probabilities that `queries` asked for into `results`; rows in error stay so."""
        scores, ids, logprobs = found
        records = scores.view(SCORE).tolist()
        for query, score, best, values in zip(queries, records, ids.tolist(), logprobs.tolist(), strict=True):
            token, _, error = results[query.row]
            if error is not None:
                continue
            try:
                results[query.row] = _scored(query, score, best, values, token)
            except BaseException as failure:
                fail(self.failed, self._rows[query.row].seq, failure, "logprobs")


def _scored(query: LogprobQuery, score: tuple[Any, ...], best: list[int], values: list[float], token: int) -> RowResult:
    """The result of a row that gave `token`, if it gave one, with the log-probabilities that `query` asked for."""
    _, logprob, rank, flags, _ = score
    if flags:
        return RowResult(-1, None, NUMERICS)
    token = query.token if query.token >= 0 else token
    top = tuple((i, v) for i, v in zip(best[: query.k], values, strict=False) if i >= 0)
    return RowResult(token, TokenLogprob(token, logprob, rank, top))


def _logsumexp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log of the sum of exponentials of each row."""
    most = logits.max(1, keepdims=True)
    total: NDArray[np.float64] = most[:, 0] + np.log(np.exp(logits - most).sum(1, dtype=np.float64))
    return total


class Sampler:
    """Chooses tokens. A choice depends on nothing but the row's logits, the request, and (seed, position, index).

    Log-probabilities are of the model's own logits, before penalties and temperature (vLLM's `raw_logprobs`); where
    rules of speech exclude tokens, of what they leave, as transformers judges a text by.
    """

    def __init__(self, ops: SamplingOps, vocab_size: int, masks: MaskBuilder | None = None) -> None:
        """`masks`: of rows whose tokens follow a grammar."""
        self._ops = ops
        self._vocab_size = vocab_size
        self._histories: dict[Sequence, LogitEdits] = {}
        self._history_limit = 64
        self.masks = masks
        self._reserve(64)

    def _reserve(self, rows: int) -> None:
        self._buffer = bytearray(rows * DRAW.itemsize)
        self._draws: Records = np.frombuffer(self._buffer, DRAW)

    def tokens(self, logits: Array, rows: GenericSequence[LogitRow]) -> list[int]:
        """The tokens alone that `rows` give, -1 on error; the same as those of a call."""
        return [result.token for result in self(logits, rows, scores=False).results()]

    def best(
        self, logits: Array, rows: GenericSequence[LogitRow], count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The `count` tokens that `rows` most likely give, and how likely: [n, count]; -1 where there is no token.

        The first is what a row gives, the next what it would give if that were excluded, and so on: where tokens are
        drawn the runners-up of the race, of which each is as likely as if the logits were known up to such a noise.
        """
        tokens = np.full((count, len(rows)), -1, np.int32)
        tokens[0] = self.tokens(logits, rows)
        draws, places = self._draws[: len(rows)], np.arange(len(rows))
        values = np.zeros((count, len(rows)))
        heat = np.maximum(draws["temperature"], GREEDY_BELOW)
        greedy = draws["temperature"] < GREEDY_BELOW
        total = _logsumexp(self._ops.host(logits))
        for rank in range(count):
            if rank:
                tokens[rank] = self._ops.fetch(self._ops.sample(logits, draws))()[0]
            at = places, np.maximum(tokens[rank], 0)
            values[rank] = self._ops.host(logits[at])
            logits[at] = -math.inf
        for i in np.flatnonzero(~greedy):
            record, ids = draws[i], np.maximum(tokens[:, i], 0).astype(np.int64)
            chosen = noise(int(record["seed"]), int(record["position"]), int(record["stream"]), ids)
            values[:, i] = values[:, i] / heat[i] - np.log(-np.log1p(-chosen))
            total[i] = np.logaddexp.reduce(values[:, i])
        return tokens.T, np.nan_to_num(np.exp(values - total)).T

    def __call__(self, logits: Array, rows: GenericSequence[LogitRow], scores: bool = True) -> Drawn:
        """What `rows` give, one per row of logits [R, V] float32 (contiguous, changed in place). Waits for nothing."""
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(
                f"logits {tuple(logits.shape)} for {len(rows)} rows and a vocabulary of {self._vocab_size}"
            )
        if len(rows) > len(self._draws):
            self._reserve(2 * len(rows))
        edits: list[RowEdits] = []
        masks, failed = dict[int, Ints](), Failed()
        for of in rows:
            if of.seq.guide is not None and self.masks is not None:
                masks, failed = self.masks.of(rows)
                break
        work = SamplingWork([], set(), [], [], failed)
        for row, of in enumerate(rows):
            place = len(work.drawn)
            try:
                if of.seq not in failed:
                    self._add_row(row, of, masks.get(row), work, edits, scores)
            except BaseException as error:
                fail(failed, of.seq, error, "sampling")
            if failed and of.target is None and of.seq in failed:
                work.drawn[place:] = [row]
                PACK_DRAW(self._buffer, place * DRAW.itemsize, row, 0, 0, 0, 0, 0.0, 1.0, 0.0)
        return Drawn(rows, work, self._run(logits, edits, work, rows, bool(masks)), self._ops)

    def _add_row(
        self, row: int, of: LogitRow, mask: Ints | None, work: SamplingWork, edits: list[RowEdits], scores: bool
    ) -> None:
        """Add what is asked of one row to `work` and `edits`, and its record to the draws."""
        seq, position, target, node = of
        params = seq.request.params
        if target is not None:
            known = target if target < self._vocab_size else 0  # rows of images stand for no token
            work.scored.append(LogprobQuery(row, row, known, params.prompt_logprobs or 0))
            return
        place = len(work.drawn)
        PACK_DRAW(
            self._buffer,
            place * DRAW.itemsize,
            row,
            max(params.top_k, 0),
            seq.request.seed & _SEED_MASK,
            position,
            seq.index,
            params.temperature,
            params.top_p,
            params.min_p,
        )
        edited = seq.request.edits_logits(position - seq.prompt_len) or mask is not None
        if edited:
            edit = self._history(seq).edits(row, position, node)
            edit.mask = mask
            edits.append(edit)
            work.edited.add(row)
        work.drawn.append(row)
        if params.logprobs is None or not scores:
            return
        if edited and seq.request.speech is None:
            work.raw.append(LogprobQuery(row, len(work.raw), -1 - place, params.logprobs))
        else:
            work.scored.append(LogprobQuery(row, row, -1 - place, params.logprobs))

    def _run(
        self, logits: Array, edits: list[RowEdits], work: SamplingWork, rows: GenericSequence[LogitRow], guided: bool
    ) -> list[Found]:
        """Edit, draw, then score what was asked for; edited rows that want log-probabilities are copied aside first."""
        raw = logits[[query.row for query in work.raw]] if work.raw else logits
        for edit in edits:
            self._add_speech_mask(logits, edit, rows[edit.row], work.failed)
        if edits:
            self._penalize(logits, edits, rows, work.failed)
        found: list[Found] = []
        if work.drawn:
            found += self._ops.sample(logits, self._draws[: len(work.drawn)])
        if guided:
            self._advance_guides(logits, rows, work, found)
        drawn = found[0] if found else None
        for source, queries in ((logits, work.scored), (raw, work.raw)):
            if queries:
                records = np.array([(q.at, q.token) for q in queries], QUERY)
                found += self._ops.top_logprobs(source, records, max(q.k for q in queries), drawn)
        return found

    def _add_speech_mask(self, logits: Array, edit: RowEdits, of: LogitRow, failed: Failed) -> None:
        """Add what rules of speech exclude, of a row whose request has such."""
        seq = of.seq
        if seq.request.speech is None:
            return
        try:
            said = seq.tokens[seq.prompt_len : of.position]
            said += [seq.draft.tokens[node] for node in seq.draft.branch(of.node)]
            mask = mask_of(seq.request.speech, said, self._ops.host(logits[edit.row]))
            edit.mask = mask if edit.mask is None else mask & edit.mask[: len(mask)]
        except Exception as error:
            fail(failed, seq, error, "sampling")

    def _penalize(self, logits: Array, edits: list[RowEdits], rows: GenericSequence[LogitRow], failed: Failed) -> None:
        """Edit logits. An op that refuses has changed nothing: row by row, it says which of them it refuses."""
        try:
            self._ops.penalize(logits, edits)
        except Exception:
            for edit in edits:
                try:
                    self._ops.penalize(logits, [edit])
                except Exception as error:
                    fail(failed, rows[edit.row].seq, error, "sampling")

    def _advance_guides(
        self, logits: Array, rows: GenericSequence[LogitRow], work: SamplingWork, found: list[Found]
    ) -> None:
        """Have the guides of `rows` take what was drawn, which waits for the device; what is refused is drawn again."""
        tokens, flags = found
        places = {row: place for place, row in enumerate(work.drawn)}
        given = [-1] * len(rows)
        for row, token in zip(work.drawn, self._ops.fetch([tokens])()[0].tolist(), strict=True):
            given[row] = token

        def redraw(edits: list[RowEdits], again: list[int]) -> list[int]:
            self._penalize(logits, edits, rows, work.failed)
            where = [places[row] for row in again]
            more = cast("list[Any]", self._ops.sample(logits, self._draws[where]))
            known: list[int] = self._ops.fetch(more[:1])()[0].tolist()
            tokens[where], flags[where] = more
            return known

        settle(rows, given, redraw, work.failed)

    def _history(self, seq: Sequence) -> LogitEdits:
        """The sequence's history; those of finished sequences are dropped when the table has doubled."""
        history = self._histories.get(seq)
        if history is None:
            if len(self._histories) >= self._history_limit:
                self._histories = {s: h for s, h in self._histories.items() if s.status != Status.FINISHED}
                self._history_limit = max(64, 2 * len(self._histories))
            history = self._histories[seq] = LogitEdits(seq)
        return history
