"""Cases of every op, by the module of its definition."""

from __future__ import annotations

import quire.ops.backend  # noqa: F401  (registers the ops)
from op_cases import (  # noqa: F401  (register their cases)
    convolution,
    entries,
    indexer,
    lora,
    mla,
    moe,
    ngrams,
    recurrent,
    reference,
    rowwise,
    sampling,
    states,
    streams,
    whole,
)
from op_cases.registry import CASES, cases, of_module

__all__ = ["CASES", "cases", "of_module"]
