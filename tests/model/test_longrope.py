"""LongRoPE: the factors of short or of long sequences by the length that a request may reach, as in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oracle import logits, relative_error, write
from paged_model import prompt
from quire import LLM, SamplingParams
from quire.compress.checkpoint.net import Net
from quire.core.errors import ModelError
from quire.model.families import rope as ropes_of
from quire.model.families.rope import LongRope, Plain, Rope, shared_tables

ORIGINAL, LONGEST = 16, 64
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
           "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", FACTORS | {"factor": 4.0}),
    "minicpm": ("llama", FACTORS | {"factor": 1.0, "attention_factor": 1.25}),
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "max_num_seqs": 8,
                           "max_model_len": LONGEST}  # fmt: skip


def written(folder: Path, kind: str) -> PreTrainedModel:
    family, rope = KINDS[kind]
    return write(folder, family, rope_parameters=rope, original_max_position_embeddings=ORIGINAL,
                 max_position_embeddings=LONGEST)  # fmt: skip


def expected(model: PreTrainedModel, tokens: list[int], long: bool) -> list[float]:
    """Log-probabilities of `tokens[1:]`; the long factors also for a short text, which more follows then."""
    given = tokens + prompt(ORIGINAL + 1, 9) if long else tokens
    rows = logits(model, given)[: len(tokens) - 1].double().log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)]


def asked(max_tokens: int | None, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **more)


def said(llm: LLM, jobs: list[tuple[list[int], int | None]]) -> list[tuple[list[int], list[float]]]:
    """Tokens, and log-probabilities of the prompt's, of requests in one batch."""
    params = [asked(most, prompt_logprobs=0) for _, most in jobs]
    found = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], params, use_tqdm=False)
    rows = [zip(ids[1:], each.prompt_logprobs[1:], strict=True) for (ids, _), each in zip(jobs, found, strict=True)]  # type: ignore[index]
    values = [[row[token].logprob for token, row in pairs if row is not None] for pairs in rows]
    return [(each.outputs[0].token_ids, v) for each, v in zip(found, values, strict=True)]


JOBS: list[tuple[int, int | None]] = [(5, 4), (12, 4), (5, 12), (12, 20), (20, 4), (40, 6), (9, None)]
"""Lengths of prompts, and tokens that may follow."""


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    yield folder, written(folder, request.param)


def test_both_ranges_equal_transformers_in_one_batch(model: tuple[Path, PreTrainedModel]) -> None:
    folder, oracle = model
    jobs = [(prompt(length, length), most) for length, most in JOBS]
    with LLM(str(folder), **OPTIONS) as llm:
        together = said(llm, jobs)
        alone = [said(llm, [job])[0] for job in jobs]
    assert together == alone
    for (ids, most), (_, values) in zip(jobs, together, strict=True):
        long = most is None or len(ids) + most > ORIGINAL
        want = expected(oracle, ids, long)
        assert max(abs(a - b) for a, b in zip(values, want, strict=True)) <= 1e-4, (len(ids), most)
        other = expected(oracle, ids, not long) if len(ids) <= ORIGINAL else None
        assert other is None or max(abs(a - b) for a, b in zip(values, other, strict=True)) > 1e-3


def test_keys_of_one_kind_never_meet_the_other(model: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = model
    ids = prompt(12, 3)
    with LLM(str(folder), **OPTIONS) as llm:
        cached = [
            llm.generate({"prompt_token_ids": ids}, asked(most), use_tqdm=False)[0].num_cached_tokens
            for most in (2, 30, 2, 30)
        ]
    assert cached[:2] == [0, 0] and min(cached[2:]) > 0


DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "self": {"method": "self", "quantization": "int8", "num_speculative_tokens": 3},
    "tree": {"method": "ngram", "prompt_lookup_min": 1, "topk": 2, "num_draft_tokens": 5, "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_change_nothing(kind: str, tmp_path: Path) -> None:
    written(tmp_path, "phi3")
    jobs: list[tuple[list[int], int | None]] = [(prompt(3, 1) * 3, 6), (prompt(3, 1) * 3, 20), (prompt(20, 2), 12)]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        want = [tokens for tokens, _ in said(llm, jobs)]
    with LLM(str(tmp_path), **OPTIONS, speculative_config=DRAFTS[kind]) as llm:
        assert [tokens for tokens, _ in said(llm, jobs)] == want


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_turn_alike(ranks: str, model: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = model
    jobs = [(prompt(length, length), most) for length, most in JOBS]
    with LLM(str(folder), **OPTIONS) as llm:
        want = said(llm, jobs)
    with LLM(str(folder), **OPTIONS, **{ranks: 2}) as llm:
        found = said(llm, jobs)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    pairs = [pair for (_, a), (_, b) in zip(found, want, strict=True) for pair in zip(a, b, strict=True)]
    assert max(abs(a - b) for a, b in pairs) <= 1e-4


def test_the_workbench_turns_as_transformers_does(tmp_path: Path) -> None:
    oracle, ids = written(tmp_path, "phi3"), prompt(24, 5)
    net = Net.open(str(tmp_path))
    for length in (ORIGINAL, 24):
        got = net.logits(torch.tensor([ids[:length]]))[0]
        assert relative_error(got, logits(oracle, ids[:length])) <= 1e-5


def test_tables_and_what_they_take() -> None:
    scaling = LongRope((1.0,) * 4, (2.0,) * 4, ORIGINAL, 1.5)
    ropes = (Rope(1e4, 8, scaling), Rope(1e4, 8, Plain()))
    assert (ropes_of.short_reach(ropes, ORIGINAL), ropes_of.short_reach(ropes, LONGEST)) == (0, ORIGINAL)
    for rope, table in shared_tables(ropes, LONGEST).items():
        assert table.shape == (LONGEST + ORIGINAL, 2, 4)
        assert np.array_equal(table[:LONGEST], rope.table(LONGEST))
        assert np.array_equal(table[LONGEST:], rope.table(ORIGINAL))
    assert all(len(table) == ORIGINAL for table in shared_tables(ropes, ORIGINAL).values())
    other = Rope(1e4, 8, LongRope((1.0,) * 4, (2.0,) * 4, 2 * ORIGINAL, 1.5))
    with pytest.raises(ModelError, match="differ"):
        shared_tables((*ropes, other), LONGEST)
