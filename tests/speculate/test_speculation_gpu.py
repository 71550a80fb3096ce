"""Speculation on a device that pretends, and by the GPU's kernels under Triton's interpreter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from head_folders import write_dflash, write_eagle, write_medusa
from often import one_of
from queueing_engine import BROKEN, MISSING, ROOMY, SHORT, SMALL, Answers, build, joined, make_requests, request, run
from queueing_engine import folder as folder
from quire.core.config import flat_config
from quire.core.request import Request
from quire.core.speculation import HEADS
from quire.engine.start import start_engine
from tiny_model import OPTIONS
from triton_ops import needs_triton
from turns import working

__all__ = ["folder"]
BRANCHING = ("ngram", "suffix", "layers", "model", "medusa", "eagle3")
WAYS = (*BRANCHING, "dflash")
TREES = tuple(f"{way} tree" for way in BRANCHING)


def asked(way: str, folder: Path, adaptive: bool = False) -> str:
    """What `speculative_config` says; the draft model is the same folder, whose embedding of BROKEN is whole."""
    way, _, branches = way.partition(" ")
    ways: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        "suffix": {"method": "suffix", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        "layers": {"method": "self", "layers": 1, "num_speculative_tokens": 2},
        "model": {"model": str(folder), "num_speculative_tokens": 3},
        "medusa": {"method": "medusa", "model": str(folder / "medusa")},
        "eagle3": {"method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": 3},
        "dflash": {"method": "dflash", "model": str(folder / "dflash"), "num_speculative_tokens": 3},
    }
    config = json.loads((folder / "config.json").read_text())
    sizes = config["hidden_size"], config["vocab_size"]
    if way == "medusa":
        write_medusa(folder / "medusa", *sizes)
    if way == "eagle3":
        ours = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}}
        write_eagle(folder / "eagle3", "eagle3", *sizes, 100, **ours)
    if way == "dflash":
        write_dflash(folder / "dflash", *sizes, (0,))
    tree = {"topk": 2, "num_draft_tokens": 5} if branches else {}
    return json.dumps(ways[way] | tree | {"adaptive": adaptive})


REQUESTS = make_requests(18, 4, kinds=(1, 4))


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Answers, int]:
    """Answers of plain decoding by the definitions, and how many rows gave no numbers."""
    with pytest.MonkeyPatch.context() as patch:
        plain = build(folder, patch, **ROOMY)
    return run(plain, REQUESTS, random.Random(1))[0], plain.runner.numeric_errors


CASES = {"short": ("side", SHORT, False), "roomy": ("main", ROOMY, False), "adaptive": ("side", ROOMY, True)}
"""Which queue is eager, how many blocks there are, and whether the cost model decides."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("way", "case"), one_of(4, [(way, case) for case in CASES for way in WAYS + TREES]))
def test_drafts_give_the_same_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: tuple[Answers, int], way: str, case: str
) -> None:
    eager, room, adaptive = CASES[case]
    late = build(folder, monkeypatch, eager, max_model_len=60, speculative_config=asked(way, folder, adaptive), **room)
    answers, errors = expected
    found, _ = run(late, REQUESTS, random.Random(50))
    assert found.keys() == answers.keys()
    for key, outputs in found.items():
        *mine, numbers = joined(outputs)
        *theirs, wanted = joined(answers[key])
        assert mine == theirs, key
        assert numbers == pytest.approx(wanted, abs=1e-4), key
    assert late.speculator is not None
    totals = late.speculator.totals
    assert adaptive or totals.tokens >= totals.accepted > 0 or (way.split()[0] in HEADS and totals.tokens > 0)
    assert errors == late.runner.numeric_errors > 0, "a guess that gives no numbers is no error"


def test_a_guess_that_gives_no_numbers_harms_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the token whose embedding is NaN: its keys and values reach no answer, nor does its error."""
    plain = build(folder, monkeypatch, **ROOMY)
    engine = build(folder, monkeypatch, speculative_config=asked("ngram", folder), **ROOMY)
    assert engine.speculator is not None

    class Wrong:
        """Says BROKEN at every second place."""

        passes, longest, weight_bytes, seconds = False, 10**9, 0, 0.0

        def propose(self, seqs: Any, limits: Any) -> None:
            for seq, limit in zip(seqs, limits, strict=True):
                seq.draft.tokens = [9, BROKEN, 9][:limit]

        def ready(self, seq: Any) -> bool:
            return True

        def computed(self, plan: Any, follow: bool, results: Any = ()) -> None:
            pass

    engine.speculator.proposer = Wrong()
    requests = [r for r in make_requests(20, 3) if BROKEN not in r.prompt]
    expected, _ = run(plain, requests, random.Random(1))
    found, _ = run(engine, requests, random.Random(2))
    assert {key: joined(outputs)[:5] for key, outputs in found.items()} == {
        key: joined(outputs)[:5] for key, outputs in expected.items()
    }
    assert engine.scheduler.preemptions > 0 and engine.runner.numeric_errors == 0


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, "auto") for way in (*WAYS, *TREES)), ("medusa", "bfloat16"), ("eagle3", "bfloat16")]
)
def test_drafts_by_the_kernels_of_a_gpu_give_the_same_tokens(folder: Path, way: str, dtype: str) -> None:
    answers = []
    for more in ({}, {"speculative_config": asked(way, folder)}):
        options = OPTIONS | {"device": "cuda", "ops": MISSING, "model": str(folder), "dtype": dtype} | SMALL | more
        engine = start_engine(flat_config(**options))
        requests: list[Request] = [request(i, p) for i, p in enumerate(((5, 6, 7, 5, 6, 7), (9,) * 20, (8, 4)))]
        for each in requests:
            engine.submit(each)
        tokens: dict[str, list[int]] = {}
        for _ in working(engine):
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.tokens)
        answers.append(tokens)
        if engine.speculator is not None:
            assert engine.speculator.totals.tokens > 0
    assert answers[0] == answers[1]
