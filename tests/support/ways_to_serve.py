"""Ways to serve requests that must not change a bit of any answer: bounds of steps, drafts, scarce caches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from engine_answers import Answer, engine_of
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from speculation_methods import answers, requests_of


def asked(name: str, prompt: list[int], **params: Any) -> Request:
    return Request(
        id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=9, logprobs=2, **params), seed=1, arrival=0.0
    )


def differing(got: dict[str, list[Answer]], want: dict[str, list[Answer]]) -> list[tuple[str, int]]:
    return [
        (name, i)
        for name, rows in want.items()
        for i, (one, other) in enumerate(zip(rows, got[name], strict=True))
        if one.bits() != other.bits() or one.reason != other.reason
    ]


WAYS: dict[str, st.SearchStrategy[Any]] = {
    "max_num_batched_tokens": st.sampled_from((1, 2, 3, 7, 16, 64, 512)),
    "max_num_seqs": st.sampled_from((1, 3, 8)),
    "block_size": st.sampled_from((1, 2, 4, 16)),
    "enforce_eager": st.booleans(),
    "threads": st.sampled_from((1, 2)),
    "scarce": st.booleans(),
    "drafts": st.sampled_from((0, 1, 2, 3, 5, 8)),
}
"""How a request may be served: `scarce` cache, drafts of so many tokens."""


def compared(folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int) -> LocalEngine:
    """Serve some of the requests in `way`; none differs from what it gives alone."""
    options = dict(way)
    scarce, drafts, method = options.pop("scarce"), options.pop("drafts"), options.pop("method")
    options["max_num_seqs"] = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    options["num_blocks"] = (260 if scarce else 4096) // options["block_size"] + 24
    if drafts:
        spec: dict[str, Any] = {"method": method, "num_speculative_tokens": drafts, "adaptive": False}
        spec |= {"quantization": "int4"} if method == "self" else {"prompt_lookup_min": 1}
        options["speculative_config"] = json.dumps(spec)
    engine = engine_of(model=str(folder), **options)
    some = random.Random(seed).sample(requests_of(99, ""), 7)
    assert not differing(answers(engine, some), {r.id: alone[r.id] for r in some}), way
    return engine
