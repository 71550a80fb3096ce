"""What a request wants changed in its logits before a token is drawn: penalties, biases, bans and allow-lists."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.core.sequence import Sequence
from quire.ops.sampling import RowEdits


def _ids(values: object) -> NDArray[np.int32]:
    return np.array(sorted(values), np.int32)  # type: ignore[call-overload]


def _read(seq: Sequence) -> set[int]:
    """The distinct tokens of the prompt, without rows of images, which stand for none."""
    found = set(seq.tokens[seq.encoder.lead : seq.prompt_len])
    for image in seq.request.images:
        for start, count in image.runs:
            found.difference_update(seq.tokens[start : start + count])
    return found


class LogitEdits:
    """The edits of one sequence, kept up to date as it grows.

    Everything is a function of the request and the tokens, so a history can be dropped and built again at any time.
    Rows of a draft are edited as if its tokens stood there; they are not kept, as they may be none.
    """

    __slots__ = ("allowed", "banned", "bias", "counted", "counts", "ends", "ids", "seq", "slots")

    def __init__(self, seq: Sequence) -> None:
        params, request = seq.request.params, seq.request
        self.seq = seq
        self.allowed = None if params.allowed_token_ids is None else _ids(set(params.allowed_token_ids))
        self.bias = None
        if params.logit_bias:
            ids = _ids(params.logit_bias)
            self.bias = (ids, np.array([params.logit_bias[i] for i in ids.tolist()], np.float32))
        self.ends = set(request.eos_token_ids) | set(params.stop_token_ids)
        self.banned = {w[0] for w in request.bad_words_ids if len(w) == 1}
        self._forget()

    def _forget(self) -> None:
        """Start counting anew: the prompt's ids count as seen when there is a repetition penalty, with count 0.

        Those of an encoder do not, as in transformers: an output may well repeat what it reads.
        """
        seq = self.seq
        penalized = seq.request.params.repetition_penalty != 1.0
        unique = sorted(_read(seq)) if penalized else []
        self.slots = {token: slot for slot, token in enumerate(unique)}
        self.ids = np.zeros(max(64, 2 * len(unique)), np.int32)
        self.counts = np.zeros_like(self.ids)
        self.ids[: len(unique)] = unique
        self.counted = seq.prompt_len

    def _count(self, position: int) -> None:
        """Bring the counts to the output before `position`; each token is counted once, so a step costs O(1)."""
        if position < self.counted:
            self._forget()
        for token in self.seq.tokens[self.counted : position]:
            slot = self.slots.get(token)
            if slot is None:
                slot = self.slots[token] = len(self.slots)
                if slot == len(self.ids):
                    self.ids, self.counts = (np.concatenate((a, np.zeros_like(a))) for a in (self.ids, self.counts))
                self.ids[slot] = token
            self.counts[slot] += 1
        self.counted = position

    def _seen(self, position: int, drafted: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The distinct ids before `position` and their counts, as they are now: later rows count on."""
        self._count(min(position, len(self.seq.tokens)))
        used = len(self.slots)
        ids, counts = self.ids[:used], self.counts[:used].copy()
        for token in drafted:
            slot = np.flatnonzero(ids == token)
            if len(slot):
                counts[slot] += 1
            else:
                ids, counts = np.append(ids, np.int32(token)), np.append(counts, np.int32(1))
        return ids, counts

    def _bans(self, position: int, drafted: list[int]) -> NDArray[np.int32] | None:
        """Ids that may not come at `position`: ends before `min_tokens`, and the last id of a bad word about to be
        completed (its other ids are the end of the output)."""
        seq = self.seq
        tokens = seq.tokens + drafted if drafted and seq.request.bad_words_ids else seq.tokens
        banned = set(self.banned)
        if position - seq.prompt_len < seq.request.params.min_tokens:
            banned |= self.ends
        for word in seq.request.bad_words_ids:
            start = position - len(word) + 1
            if len(word) > 1 and start >= seq.prompt_len and tuple(tokens[start:position]) == word[:-1]:
                banned.add(word[-1])
        return _ids(banned) if banned else None

    def edits(self, row: int, position: int, node: int = -1) -> RowEdits:
        """The changes to logits row `row`, which predicts the token at `position`, after the draft's `node`."""
        params = self.seq.request.params
        drafted = [self.seq.draft.tokens[j] for j in self.seq.draft.branch(node)]
        seen = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            seen = self._seen(position, drafted)
        return RowEdits(
            row,
            self.allowed,
            self._bans(position, drafted),
            self.bias,
            seen,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
