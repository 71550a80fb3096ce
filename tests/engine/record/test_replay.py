"""An engine that is told what another one put out goes on with the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

import paths
from chaos_load import requests
from oracle import BACKENDS
from quire.core.config import flat_config
from quire.core.request import Output, Request
from quire.engine.local import LocalEngine
from turns import reports

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PYDOC = str(paths.PYDOC)
Found = dict[tuple[str, int], tuple[list[int], list[Any], str | None]]


def run(asked: list[Request], **options: Any) -> tuple[Found, list[Output]]:
    """(tokens, log-probabilities, why it ended) of each sequence; all outputs."""
    engine = LocalEngine(flat_config(model=PYDOC, max_model_len=256, **options))
    for each in asked:
        engine.submit(each)
    found: dict[tuple[str, int], list[Any]] = {}
    outputs = []
    for report in reports(engine):
        for output in report.outputs:
            outputs.append(output)
            row = found.setdefault((output.request_id, output.index), [[], [], None])
            row[0] += output.tokens
            row[1] += output.logprobs
            row[2] = output.finish_reason
    return {key: tuple(row) for key, row in found.items()}, outputs  # type: ignore[misc]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 7, "max_num_seqs": 7}, {"num_blocks": 18},
     {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'}],
    ids=["plain", "no_prefix", "chunks", "preempted", "drafts"],
)  # fmt: skip
def test_what_was_told_is_gone_on_from(options: dict[str, Any]) -> None:
    whole, _ = run(requests())
    rng = random.Random(7)
    for _ in range(3):
        cuts = {key: rng.randrange(len(tokens) + 1) for key, (tokens, _, _) in whole.items()}
        asked = []
        for each in requests():
            told = []
            for index in range(each.params.n):
                tokens, _, _ = whole[each.id, index]
                cut = cuts[each.id, index]
                told.append(None if cut == len(tokens) else tuple(tokens[:cut]))
            if any(part is not None for part in told):
                asked.append(replace(each, emitted=tuple(told)))
        rest, outputs = run(asked, **options)
        for key, (tokens, logprobs, reason) in whole.items():
            cut = cuts[key]
            want = (tokens[cut:], logprobs[cut:], reason)
            assert (cut == len(tokens) and key not in rest) or rest[key] == want, key
        scored = [output for output in outputs if output.prompt_logprobs is not None]
        assert len(scored) == (cuts["scored", 0] == 0), "prompts are scored with the first token only"
