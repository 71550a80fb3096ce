"""Rows that read what an indexer chooses, on the GPU backend: the tokens of the reference, bits that do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from op_cases.indexer import index_case
from op_cases.mla import chosen_tokens, latent_case, reading
from oracle import write
from quire.core.config import flat_config
from quire.core.dtypes import BF16, F32
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.indexer import Choice, IndexLayout
from quire.ops.latents import LatentLayout
from quire.ops.op import REGISTRY
from speculation_methods import TINY
from triton_ops import TRITON_OPS, needs_triton, run_gpu
from turns import working

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
MISSING = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)
PROMPTS = (tuple(range(3, 24)), (7, 8), tuple(range(40, 51)))
GPU: dict[str, Any] = {"device": "cuda", "ops": MISSING}
Answers = dict[str, tuple[list[int], list[float]]]


def answers(folder: Path, prompts: tuple[tuple[int, ...], ...] = PROMPTS, **options: Any) -> Answers:
    """Tokens and their log-probabilities by request."""
    sizes = {"max_model_len": 32, "block_size": 4, "dtype": "float32", "num_blocks": 32, "max_num_seqs": 3}
    engine = start_engine(flat_config(model=str(folder), **(sizes | options)))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    for tokens in prompts:
        engine.submit(Request(id=str(tokens[0]), prompt=tokens, params=params, seed=0, arrival=0.0))
    found: Answers = {str(tokens[0]): ([], []) for tokens in prompts}
    for _ in working(engine):
        for output in engine.step():
            assert output.error is None
            found[output.request_id][0].extend(output.tokens)
            found[output.request_id][1].extend(p.logprob for p in output.logprobs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexers", "shared indexers", "block indexers"])
def test_tokens_are_those_of_the_reference_and_bits_do_not_change(name: str, tmp_path: Path) -> None:
    family, facts = TINY[name]
    write(tmp_path, family, **facts)
    want, found = answers(tmp_path, device="reference"), answers(tmp_path, **GPU, max_num_batched_tokens=16)
    for request, (tokens, logprobs) in want.items():
        assert found[request][0] == tokens and found[request][1] == pytest.approx(logprobs, abs=1e-4)
    cut = answers(tmp_path, **GPU, max_num_batched_tokens=5, enable_prefix_caching=False, enforce_eager=True)
    assert cut == found
    assert answers(tmp_path, PROMPTS[:1], **GPU, max_num_batched_tokens=16) == {"3": found["3"]}


@pytest.mark.parametrize(("dtype", "sinks"), [(BF16, False), (F32, False), (BF16, True)])
def test_all_tokens_chosen_are_as_none(dtype: Any, sinks: bool) -> None:
    """Bit for bit, so a row does not depend on how many tokens could be chosen."""
    g = torch.Generator().manual_seed(0)
    case = latent_case(g, LatentLayout(16, 1, 16, dtype, rank=32), 5, 24, ((3, 600), (5, 5), (1, 70)), sinks)
    every, few = chosen_tokens(g, case, 640), chosen_tokens(g, case, 300)
    want, same, other = (run_gpu("latent_attention", c)[0] for c in (case, reading(case, every), reading(case, few)))
    assert torch.equal(want, same) and not torch.equal(want, other)


@pytest.mark.parametrize("rows", [((6, 300),), ((1, 40), (6, 300))])
def test_scores_that_do_not_fit_are_picked_in_parts(
    rows: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = index_case(torch.Generator().manual_seed(0), IndexLayout.of(16, 24, BF16), 3, Choice(20), rows, exact=False)
    whole = run_gpu("choose_tokens", case)[0]
    monkeypatch.setattr("quire.ops.triton.indexer.MOST_SCORES", 4 * 320 * 2)
    assert torch.equal(run_gpu("choose_tokens", case)[0], whole)
