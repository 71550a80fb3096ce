"""Whose an error is that the engine's loop meets: a client's, a request's, a rank's or the engine's own.
See docs/design/determinism.md.

Only the last one ends an engine for its own sake. What is done in a step is shared, or it is a part of one request's
work, for which `of_request` stands around it:

| part | what is done in it | where |
|---|---|---|
| admission | a request is checked and queued | `Engine.submit` |
| grammar | it is compiled, followed, made a mask, drafted from, asked whether it is over | |
| | | `features.structured_output`, `speculate.draft_limits`, `sched.growth` |
| sampling | the record of a draw, penalties, biases and bans | `sample.sampler` |
| logprobs | log-probabilities of tokens and of the prompt | `sample.sampler` |
| drafting | tokens looked up in the sequence and in earlier outputs | `speculate.speculator` |
| adapter | the place of a LoRA adapter's matrices | `run.builder` |
| images | an image's features, and its rows of a step | `features.images`, `run.builder` |
| pooling | the vector that hidden rows make, and its classes | `features.pooling`, `sched.growth` |

A request whose part fails ends with the error. Its rows of the step are computed as if nothing were the matter and
dropped with its blocks, so that the plan stands and the rows of others keep their bits. Everything else that raises is
of the engine: plans, the account of blocks, the forward pass and the ops over all rows. Other processes of an engine
(`RankFailure`) take it along when they end, as they have shares of each layer; no request is tried for that.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Literal

from quire.core.errors import BadRequest, NumericError, PartFailure, QuireError, RankFailure, is_panic
from quire.core.sequence import Sequence

log = logging.getLogger("quire.engine")

Part = Literal["admission", "grammar", "sampling", "logprobs", "drafting", "adapter", "images", "pooling"]
Failed = dict[Sequence, QuireError]
"""Sequences whose part of a step failed, each with what it ends with."""


class Party(Enum):
    """Whom an error is of."""

    CLIENT = "what was asked for"
    REQUEST = "the work on one request"
    RANK = "another process of the engine"
    ENGINE = "the engine"


def party(error: BaseException) -> Party:
    """Whose `error` is, as it is: one that a part of a request's work raised has gone through `of_request`."""
    if isinstance(error, BadRequest):
        return Party.CLIENT
    if isinstance(error, (NumericError, PartFailure)):
        return Party.REQUEST
    return Party.RANK if isinstance(error, RankFailure) else Party.ENGINE


def of_request(error: BaseException, part: Part) -> QuireError:
    """What a request ends with whose `part` raised `error`.

    Raises `error` itself where it is of a rank, or asks the process to end (KeyboardInterrupt, SystemExit).
    """
    whose = party(error)
    if whose in (Party.CLIENT, Party.REQUEST):
        assert isinstance(error, QuireError)
        return error
    if whose is Party.RANK or not (isinstance(error, Exception) or is_panic(error)):
        raise error
    log.error("%s: failed for one request, which ends; others go on", part, exc_info=error)
    kind = type(error).__name__  # its message may hold paths, and is in the log
    return PartFailure(
        f"{part}: this part of the request failed ({kind}), and the request alone ended; the log has more"
    )


def fail(failed: Failed, seq: Sequence, error: BaseException, part: Part) -> None:
    """Note that `seq` ends, with the first of its errors."""
    if seq not in failed or not isinstance(error, Exception):
        failed[seq] = of_request(error, part)
