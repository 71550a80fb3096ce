"""The sampler: what requests ask for reaches the ops; a choice depends on the request and its logits only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from over_torch import select
from quire.core.config import DeviceConfig
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.plan import LogitRow
from quire.core.request import Request
from quire.core.sequence import Sequence, Status
from quire.engine.beam import BeamSearchParams
from quire.ops.backend import Ops
from quire.sample.sampler import NO_TOKEN, NUMERICS, RowResult, Sampler

VOCAB = 50
native = select(DeviceConfig(device="cpu", threads=2))
reference = select(DeviceConfig(device="reference"))
BACKENDS = pytest.mark.parametrize("ops", [native, reference], ids=["cpu", "reference"])


def sequence(
    prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), index: int = 0, **options: Any
) -> Sequence:
    """A sequence that has generated `output`; options are of Request where it has them, else of SamplingParams."""
    own = {k: options.pop(k) for k in tuple(options) if k in ("seed", "eos_token_ids", "bad_words_ids")}
    params = SamplingParams(**{"max_tokens": 100, **options})
    params.validate(VOCAB)
    request = Request(id="r", prompt=prompt, params=params, arrival=0.0, **{"seed": 5, **own})
    seq = Sequence(request, index)
    seq.tokens += output
    return seq


def next_row(seq: Sequence) -> LogitRow:
    return LogitRow(seq, len(seq.tokens))


def run(ops: Ops, logits: torch.Tensor, *seqs: Sequence) -> list[RowResult]:
    return Sampler(ops, logits.shape[1])(logits.clone(), [next_row(s) for s in seqs]).results()


def rising() -> torch.Tensor:
    """One row whose best token is the last."""
    return torch.arange(VOCAB, dtype=torch.float32)[None] / 4


@BACKENDS
@pytest.mark.parametrize(
    ("options", "output", "expected"),
    [
        ({}, (), 49),
        ({"logit_bias": {7: 100.0}}, (), 7),
        ({"logit_bias": {49: -100.0}}, (), 48),
        ({"allowed_token_ids": (4, 9)}, (), 9),
        ({"bad_words_ids": ((49,), (48,))}, (), 47),
        ({"bad_words_ids": ((8, 49),)}, (8,), 48),
        ({"bad_words_ids": ((8, 49),)}, (8, 8, 9), 49),
        ({"bad_words_ids": ((3, 49),)}, (), 49),  # its beginning stands in the prompt, not in the output
        ({"bad_words_ids": ((8, 9, 49), (9, 48))}, (8, 9), 47),
        ({"min_tokens": 2, "eos_token_ids": (49,), "stop_token_ids": (48,)}, (5,), 47),
        ({"min_tokens": 2, "eos_token_ids": (49,), "stop_token_ids": (48,)}, (5, 5), 49),
        ({"presence_penalty": 1.0}, (49, 48), 47),
        ({"presence_penalty": -2.0}, (44, 44), 44),
        ({"frequency_penalty": 0.2}, (49,), 49),
        ({"frequency_penalty": 0.2}, (49, 49), 48),
        ({"repetition_penalty": 2.0, "prompt": (49, 48)}, (47,), 46),
        ({"presence_penalty": 2.0, "prompt": (49, 48)}, (47,), 49),
        ({"allowed_token_ids": (4, 9), "bad_words_ids": ((9,),), "logit_bias": {9: 50.0}}, (), 4),
    ],
)
def test_edits(ops: Ops, options: dict[str, Any], output: tuple[int, ...], expected: int) -> None:
    seq = sequence(output=output, temperature=0.0, **options)
    (result,) = run(ops, rising(), seq)
    assert (result.token, result.error) == (expected, None)


@BACKENDS
def test_logprobs_are_of_the_raw_logits(ops: Ops) -> None:
    raw = rising()
    exact = raw[0].double().log_softmax(0)
    edited = sequence(temperature=0.0, logprobs=2, logit_bias={7: 100.0})
    plain = sequence(temperature=0.0, logprobs=0)
    unasked = sequence(temperature=0.0, logit_bias={3: 100.0})
    a, b, c = run(ops, raw.repeat(3, 1), edited, plain, unasked)
    assert a.token == 7 and a.logprob is not None
    assert (a.logprob.token, a.logprob.rank) == (7, 43)
    assert a.logprob.logprob == pytest.approx(exact[7].item(), rel=1e-5)
    assert [t for t, _ in a.logprob.top] == [49, 48]
    assert [v for _, v in a.logprob.top] == pytest.approx([exact[49].item(), exact[48].item()], rel=1e-5)
    assert b.logprob is not None and (b.token, b.logprob.rank, b.logprob.top) == (49, 1, ())
    assert (c.token, c.logprob) == (3, None)


@BACKENDS
def test_prompt_logprobs_score_the_target_and_draw_nothing(ops: Ops) -> None:
    raw = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    seq = sequence(prompt=(4, 5, 6), prompt_logprobs=3, temperature=0.0, logit_bias={9: 100.0})
    rows = [LogitRow(seq, 1, 5), LogitRow(seq, 2, 6), LogitRow(seq, 3)]
    results = Sampler(ops, VOCAB)(raw.clone(), rows).results()
    exact = raw.double().log_softmax(1)
    for i, target in ((0, 5), (1, 6)):
        logprob = results[i].logprob
        assert logprob is not None and logprob.token == target and len(logprob.top) == 3
        assert logprob.logprob == pytest.approx(exact[i, target].item(), rel=1e-5)
        assert logprob.top[0][0] == int(raw[i].argmax())
    assert results[2] == RowResult(9)
    only = Sampler(ops, VOCAB)(raw[:2].clone(), rows[:2]).results()
    assert only == results[:2]


@BACKENDS
def test_errors_name_the_cause_and_stay_in_their_row(ops: Ops) -> None:
    logits = rising().repeat(6, 1)
    logits[1, 3], logits[2, 4], logits[3], logits[5, 8] = math.nan, math.inf, -math.inf, math.nan
    seqs = [
        sequence(temperature=0.0),
        sequence(logprobs=3),
        sequence(temperature=0.0, allowed_token_ids=(1,)),
        sequence(),
        sequence(allowed_token_ids=(9,), bad_words_ids=((9,),)),
    ]
    rows = [*map(next_row, seqs), LogitRow(sequence(prompt_logprobs=1), 1, 2)]
    results = Sampler(ops, VOCAB)(logits, rows).results()
    assert [r.error for r in results] == [None, NUMERICS, NUMERICS, NUMERICS, NO_TOKEN, NUMERICS]
    assert [r.token for r in results] == [49, -1, -1, -1, -1, -1]


def requests() -> list[Sequence]:
    """Sequences that use every option, with some output each."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "logprobs": 20},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 5},
        {"logit_bias": {3: 2.0}, "allowed_token_ids": tuple(range(30)), "logprobs": 1},
        {"min_tokens": 30, "eos_token_ids": (2,), "bad_words_ids": ((7,), (1, 2)), "temperature": 0.7},
    ]
    return [sequence(output=(7, 8, 7, 1), index=i % 3, seed=i * 99, **o) for i, o in enumerate(options)]


@pytest.mark.parametrize("vocab", [VOCAB, 33_000])
def test_the_same_alone_and_in_any_batch(vocab: int) -> None:
    logits = torch.randn((6, vocab), generator=torch.Generator().manual_seed(2)) * 3
    together = run(native, logits, *requests())
    for order in ([5, 4, 3, 2, 1, 0], [2], [0, 3], [4, 4]):
        seqs = requests()
        alone = run(native, logits[order], *(seqs[i] for i in order))
        assert alone == [together[i] for i in order]  # log-probabilities to the last bit


def test_native_agrees_with_reference() -> None:
    logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(4)) * 3
    for a, b in zip(run(native, logits, *requests()), run(reference, logits, *requests()), strict=True):
        assert a.token == b.token
        assert (a.logprob is None) == (b.logprob is None)


def generate(sampler: Sampler, seq: Sequence, logits: torch.Tensor, steps: int) -> list[int]:
    """Append `steps` tokens, always from the same logits."""
    for _ in range(steps):
        (result,) = sampler(logits.clone(), [next_row(seq)]).results()
        seq.tokens.append(result.token)
    return seq.output


def test_seeds_positions_and_indices_name_the_samples() -> None:
    logits = torch.zeros((1, VOCAB))
    outputs = {
        name: tuple(generate(Sampler(native, VOCAB), seq, logits, 12))
        for name, seq in {
            "a": sequence(seed=1),
            "again": sequence(seed=1),
            "other seed": sequence(seed=2),
            "negative seed": sequence(seed=-1),
            "same as -1": sequence(seed=2**64 - 1),
            "other index": sequence(seed=1, index=1),
        }.items()
    }
    assert outputs["a"] == outputs["again"]
    assert outputs["negative seed"] == outputs["same as -1"]
    assert len(set(outputs.values())) == 4
    assert len(set(outputs["a"])) > 5


def test_history_is_a_cache() -> None:
    """Penalties are the same for a sampler that saw every step, one that starts late, and after a roll-back."""
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(8)) * 2
    options: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0, "seed": 3}
    sampler, seq = Sampler(native, VOCAB), sequence(**options)
    output = generate(sampler, seq, logits, 120)
    for cut in (0, 1, 50, 119):
        resumed = sequence(output=tuple(output[:cut]), **options)
        assert generate(Sampler(native, VOCAB), resumed, logits, 120 - cut) == output
    del seq.tokens[60:]
    assert generate(sampler, seq, logits, 120 - (60 - seq.prompt_len)) == output


def test_rows_of_a_draft_are_edited_as_if_its_tokens_stood_there() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
                               "temperature": 0.8, "logprobs": 2, "bad_words_ids": ((11, 9, 4), (9, 20)), "seed": 3,
                               "min_tokens": 5, "eos_token_ids": (30,)}  # fmt: skip
    output, draft = (5, 11), [9, 9, 1, 40]
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(8)) * 2
    one = [run(native, logits[i : i + 1], sequence(output=(*output, *draft[:i]), **options))[0] for i in range(5)]
    seq, sampler = sequence(output=output, **options), Sampler(native, VOCAB)
    seq.draft.tokens = draft
    rows = [LogitRow(seq, len(seq.tokens) + i, None, i - 1) for i in range(5)]
    assert sampler(logits.clone(), rows).results() == one
    seq.tokens += [9, 33]  # the first drafted token was kept, the second was not
    seq.draft.tokens = []
    after = run(native, logits[:1], sequence(output=(*output, 9, 33), **options))
    assert sampler(logits[:1].clone(), [next_row(seq)]).results() == after


def test_histories_of_finished_sequences_are_dropped() -> None:
    sampler = Sampler(native, VOCAB)
    for _ in range(500):
        seq = sequence(presence_penalty=0.5)
        sampler(rising(), [next_row(seq)])
        seq.status = Status.FINISHED
    assert len(sampler._histories) <= 64


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 50"):
        Sampler(native, VOCAB)(torch.zeros((1, 49)), [next_row(sequence())])


EXTREMES: tuple[Any, ...] = (
    5e-324, 1e-300, 1e-45, 1e-38, 0.0099, 100.1, 1e38, 1.7e308, 10**400, -(10**400), math.nan, math.inf, -math.inf,
)  # fmt: skip
NUMBERS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "top_k", "seed",
    "n", "min_tokens", "logprobs", "prompt_logprobs",
)  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("name", [*NUMBERS, "logit_bias"])
def test_extreme_numbers_are_refused_by_name_or_computed(ops: Ops, name: str) -> None:
    logits = torch.linspace(-1e4, 1e4, VOCAB)[None]
    for value in EXTREMES:
        for beside in ({}, {"temperature": 100.0, "min_p": 0.5}, {"temperature": 2e-5, "top_p": 0.5}):
            own = {"logit_bias": {1: value}} if name == "logit_bias" else {name: value}
            options: dict[str, Any] = {"presence_penalty": 2.0} | beside | own
            try:
                SamplingParams(**{"max_tokens": 100, **options}).validate(VOCAB)
            except BadRequest as error:
                assert error.param == name and error.message.startswith(f"{name}: "), (options, error)
                continue
            (found,) = run(ops, logits, sequence(output=(1, 2), **options))
            assert found.error is None and 0 <= found.token < VOCAB, options


def test_the_strongest_penalties_leave_numbers() -> None:
    for strength in (0.01, 100.0):
        options: dict[str, Any] = {"repetition_penalty": strength, "frequency_penalty": -2.0, "temperature": 2e-5}
        (found,) = run(native, torch.linspace(-1e4, 1e4, VOCAB)[None], sequence(output=(1, 2), **options))
        assert found.error is None


@pytest.mark.parametrize("token", ["9" * 5000, "-1", "1e3", " 5", "5.0"])
def test_a_token_id_of_a_bias_is_a_number(token: str) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        SamplingParams(logit_bias={token: 1.0}).validate(VOCAB)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "power", [1e300, -1e300, math.nan, math.inf, 10**400], ids=["large", "small", "nan", "inf", "no float"]
)
def test_powers_of_lengths_stay_numbers(power: float) -> None:
    with pytest.raises(BadRequest, match="length_penalty"):
        BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=power).validate()
