"""Cases of the ops of `quire.ops.sampling`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from op_cases.registry import cases
from quire.ops.op import Case
from quire.ops.sampling import DRAW, QUERY, RowEdits, draw_record

FILTERS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 3000, "top_p": 0.99},
)


@cases("sample")
def _sample_cases(generator: torch.Generator) -> Iterator[Case]:
    for vocab in (1, 7, 64, 1000, 32000):
        for spread in (0.01, 4.0):
            logits = torch.randn((len(FILTERS), vocab), generator=generator) * spread
            logits[:, :: max(1, vocab // 5)] = logits[:, :1]  # equal logits
            draws = [draw_record(i, 17 * i, i + 3, i % 3, **options) for i, options in enumerate(FILTERS)]
            yield {"logits": logits, "draws": np.array(draws, DRAW)}
    broken = torch.zeros((4, 100))
    broken[1, 50], broken[2, 99], broken[3] = math.nan, math.inf, -math.inf
    yield {"logits": broken, "draws": np.array([draw_record(i, temperature=t) for i in range(4) for t in (0, 1)], DRAW)}


@cases("penalize")
def _penalize_cases(generator: torch.Generator) -> Iterator[Case]:
    for vocab in (16, 1000, 32000):
        logits = torch.randn((4, vocab), generator=generator) * 5
        logits[0, 3] = math.nan
        ids = [torch.randperm(vocab, generator=generator)[:n].int().numpy() for n in (9, 3, 5, 12)]
        counts = (np.arange(12) % 4).astype(np.int32)
        yield {
            "logits": logits,
            "edits": [
                RowEdits(0, allowed=ids[0], banned=ids[1]),
                RowEdits(1, bias=(ids[2], np.linspace(-9, 9, 5, dtype=np.float32))),
                RowEdits(3, ids[0], ids[1], (ids[2], np.ones(5, np.float32)), (ids[3], counts), 1.3, 0.5, -0.7),
            ],
        }
        words = torch.randint(-(2**31), 2**31, (2, vocab // 32 + 2), generator=generator).numpy().astype(np.int32)
        words[:, ::3] = [[0], [-1]]
        yield {
            "logits": torch.randn((3, vocab), generator=generator),
            "edits": [
                RowEdits(2, mask=words[0]),
                RowEdits(0, ids[0], ids[1], (ids[2], np.ones(5, np.float32)), mask=words[1]),
            ],
        }


@cases("top_logprobs")
def _top_logprobs_cases(generator: torch.Generator) -> Iterator[Case]:
    for vocab, k in ((3, 5), (100, 0), (1000, 20), (32000, 5)):
        logits = torch.randn((5, vocab), generator=generator) * 3
        logits[0] = logits[0, 0]
        logits[1, 1] = -math.inf
        logits[4, vocab // 2] = math.nan
        targets = [(i, (i * 37) % vocab) for i in (0, 1, 2, 3, 4, 1)]
        yield {"logits": logits, "queries": np.array(targets, QUERY), "k": k}
