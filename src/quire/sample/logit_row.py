"""What a row of logits is of."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.sequence import Sequence


class LogitRow(NamedTuple):
    """One row of logits: it predicts the token at index `position` of `seq.tokens`.

    With a `target` (the prompt token known to stand there) the row is only scored, for `prompt_logprobs`. A row of the
    draft's `node` predicts what follows it and the drafted tokens before.
    """

    seq: Sequence
    position: int
    target: int | None = None
    node: int = -1
