"""Log-probabilities of prompts: made in pieces within the memory that was planned, bounded, and written off the loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from oracle import BACKENDS
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.sample.sampler import Sampler
from test_bit_equality import engine_of

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def scored(vocab: int) -> list[Request]:
    """Prompts of 1 to 130 tokens whose log-probabilities are wanted, beside two that draw alone, one of them edited."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=3, temperature=0.7, prompt_logprobs=2, logprobs=1)
    kinds = [params, params, replace(params, prompt_logprobs=None, repetition_penalty=1.2), params, params,
             replace(params, prompt_logprobs=None)]  # fmt: skip
    lengths = (130, 1, 9, 64, 65, 3)
    prompts = [tuple(rng.randrange(vocab) for _ in range(n)) for n in lengths]
    return [
        Request(id=str(i), prompt=prompt, params=kind, seed=i, arrival=0.0)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def answers(engine: LocalEngine, requests: list[Request]) -> dict[str, list[Any]]:
    """All that came of each, in order."""
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.engine.has_work:
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None
            found[out.request_id] += [out.tokens, out.logprobs, out.prompt_logprobs]
    return found


@native
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"enforce_eager": True}], ids=str)
def test_logits_of_prompts_are_made_in_pieces_that_change_no_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = list[int]()
    call = Sampler.__call__

    def noting(self: Sampler, logits: Tensor, *args: Any, **more: Any) -> Any:
        most.append(len(logits))
        return call(self, logits, *args, **more)

    monkeypatch.setattr(Sampler, "__call__", noting)
    options = {"max_num_batched_tokens": 160, "max_num_seqs": 6} | options
    whole = engine_of(**options)
    requests = scored(whole.info.vocab_size)
    want = answers(whole, requests)
    assert max(most) > 100, "in one piece, as the rows of a step are fewer than one has"
    assert len(want["0"][2]) == 129
    monkeypatch.setattr("quire.run.step.LOGITS", 1)
    for rows in (6, 7):
        most.clear()
        engine = engine_of(**(options | {"max_num_seqs": rows}))
        assert engine.engine.runner.step.most_logits == rows
        assert answers(engine, requests) == want
        assert max(most) == rows
