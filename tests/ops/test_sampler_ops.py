"""The sampling ops: native against the definitions, the definitions against the papers' and vendors' own words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_cases import CASES
from over_torch import select
from quire.core.config import DeviceConfig
from quire.ops.backend import Ops
from quire.ops.op import REGISTRY
from quire.ops.philox import noise, philox4x32
from quire.ops.sampling import DRAW, NOT_FINITE, NOTHING_ALLOWED, QUERY, RowEdits, draw_record

native = select(DeviceConfig(device="cpu", threads=2))
reference = select(DeviceConfig(device="reference"))
BACKENDS = pytest.mark.parametrize("ops", [native, reference], ids=["cpu", "reference"])
NAMES = ("penalize", "sample", "top_logprobs")


def draw(ops: Ops, logits: torch.Tensor, **options: float) -> int:
    """One token from one row."""
    names = {k: options.pop(k, 0) for k in ("seed", "position", "stream")}
    tokens, flags = ops.sample(logits.reshape(1, -1), np.array([draw_record(0, **names, **options)], DRAW))
    return -int(flags[0]) if flags[0] else int(tokens[0])


def drawn(ops: Ops, row: torch.Tensor, count: int, **options: float) -> np.ndarray:
    """Tokens of `count` positions drawn from one row."""
    records = np.array([draw_record(0, 42, position, **options) for position in range(count)], DRAW)
    tokens, flags = ops.sample(row.reshape(1, -1), records)
    assert not flags.any()
    return tokens


@pytest.mark.parametrize("isa", native.cpu.native.module.units() if native.cpu else [])
@pytest.mark.parametrize("name", NAMES)
def test_native_equals_reference_on_every_case(name: str, isa: str) -> None:
    native = select(DeviceConfig(device="cpu", isa=isa, threads=2))
    definition = REGISTRY[name]
    for case in CASES[name](torch.Generator().manual_seed(7)):
        logits = case.pop("logits")
        a, b = logits.clone(), logits.clone()
        found, wanted = getattr(native, name)(a, **case), getattr(reference, name)(b, **case)
        torch.testing.assert_close(a, b, rtol=definition.tolerance, atol=0, equal_nan=True)
        if name == "sample":
            np.testing.assert_array_equal(found, wanted)
        elif name == "top_logprobs":
            good = wanted[0]["flags"] == 0
            np.testing.assert_array_equal(found[0][["rank", "flags"]][good], wanted[0][["rank", "flags"]][good])
            np.testing.assert_array_equal(found[0]["flags"], wanted[0]["flags"])
            np.testing.assert_array_equal(found[1][good], wanted[1][good])
            for field in ("logsumexp", "logprob"):
                np.testing.assert_allclose(found[0][field][good], wanted[0][field][good], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found[2][good], wanted[2][good], rtol=1e-5, atol=1e-6)


def test_philox_known_answers() -> None:
    """The vectors published with Random123 (kat_vectors, philox4x32 10 rounds)."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.sampled_from([1, 70, 4096]))
def test_native_draws_with_the_same_numbers(seed: int, position: int, stream: int, size: int) -> None:
    expected = int(noise(seed, position, stream, np.arange(size)).argmin())
    assert draw(native, torch.zeros(size), seed=seed, position=position, stream=stream) == expected


def test_a_word_of_noise_is_the_one_that_its_token_names() -> None:
    words = philox4x32((5, 0, 2, 16 * 3 + 7), (9, 0))
    found = noise(9, 5, 2, np.array([64 * 3 + 7, 64 * 3 + 16 + 7, 64 * 3 + 48 + 7]))
    np.testing.assert_array_equal(found, (np.array([words[0], words[1], words[3]]) + 0.5) * 2.0**-32)


def test_models_that_are_close_draw_the_same_token() -> None:
    """The share of equal draws of two distributions beside 1 - TV, the most that there can be; at least 1 - TV / 1 + TV
    of it (Daliri et al. 2024)."""
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(2000, generator=generator) * 2
    q = p + torch.randn(2000, generator=generator) * 0.2
    distance = float((p.softmax(0) - q.softmax(0)).abs().sum()) / 2
    same = float((drawn(native, p, 4000) == drawn(native, q, 4000)).mean())
    assert (1 - distance) / (1 + distance) - 0.02 < same <= 1 - distance + 0.02


@BACKENDS
def test_distribution(ops: Ops) -> None:
    """Chi-square of 20,000 draws against the exact probabilities, at the 0.1 % level."""
    row = torch.tensor([2.0, 1.5, 1.0, 1.0, 0.0, -0.5, -1.0, -math.inf])
    count = 20000 if ops is native else 2000
    for options in ({}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}):
        x = row.double() / options.get("temperature", 1.0)
        kept = _kept(row, **options)
        p = x.softmax(0) * torch.tensor([i in kept for i in range(len(row))])
        p = (p / p.sum()).numpy()
        seen = np.bincount(drawn(ops, row, count, **options), minlength=len(row))
        assert not seen[p == 0].any()
        expected = count * p[p > 0]
        chi_square = float(((seen[p > 0] - expected) ** 2 / expected).sum())
        limit = {2: 10.8, 3: 13.8, 4: 16.3, 5: 18.5, 6: 20.5, 7: 22.5}[max(2, len(expected))]
        assert chi_square < limit, (options, chi_square)


def _kept(
    row: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """The candidates by brute force: sort everything, apply the definitions one after the other."""
    p = (row.double() / temperature).softmax(0).tolist()
    ranked = sorted(range(len(p)), key=lambda i: (-row[i].item(), i))
    if top_k:
        ranked = ranked[:top_k]
    total, mass, nucleus = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        nucleus.append(i)
        mass += p[i]
        if top_p < 1 and mass >= top_p * total:
            break
    floor = row.max().item() + temperature * math.log(min_p) if min_p else -math.inf
    return {i for i in nucleus if row[i].item() >= floor and p[i] > 0}


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 5, 64, 65, 300]),
    st.sampled_from([0.05, 1.0, 5.0]),
    st.sampled_from([0, 1, 3, 70]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([1.0, 0.6, 3.0]),
)
def test_candidates_are_those_of_brute_force(
    seed: int, vocab: int, spread: float, k: int, p: float, m: float, t: float
) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    row = torch.round(row * 4) / 4 if seed % 2 else row  # equal logits
    options = {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    kept = _kept(row, **options)
    found = set(drawn(native, row, 400, **options).tolist())
    assert found <= kept
    weights = (row.double() / t).softmax(0)
    share = weights / weights[sorted(kept)].sum()
    assert {i for i in kept if share[i] > 0.05} <= found  # 0.95 ** 400 = 1e-9


@BACKENDS
def test_large_vocabulary_against_brute_force(ops: Ops) -> None:
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(3)) * 0.5
    for options in ({"top_k": 5}, {"top_k": 2000, "top_p": 0.001}, {"top_p": 0.001}, {"min_p": 0.7}):
        kept = _kept(row, **options)
        assert set(drawn(ops, row, 50, **options).tolist()) <= kept
    flat = torch.zeros(50_000)
    assert drawn(ops, flat, 50, top_p=0.0001).max() < 5
    assert drawn(ops, flat, 50, top_p=0.5).max() < 25_000


@BACKENDS
def test_greedy_and_broken_rows(ops: Ops) -> None:
    row = torch.tensor([1.0, 3.0, 3.0, -math.inf] * 40)
    assert draw(ops, row, temperature=0.0) == 1
    assert draw(ops, row, temperature=1e-6) == 1
    for at in (0, 77, 159):
        for bad in (math.nan, math.inf):
            broken = row.clone()
            broken[at] = bad
            for temperature in (0.0, 1.0):
                assert draw(ops, broken, temperature=temperature) == -NOT_FINITE
    assert draw(ops, torch.full((100,), -math.inf)) == -NOTHING_ALLOWED
    assert draw(ops, torch.tensor([-math.inf, -1e30])) == 1


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn((33, 5000), generator=torch.Generator().manual_seed(1)) * 3
    options = {"temperature": 0.9, "top_p": 0.95}
    records = np.array([draw_record(i, 9, i, **options) for i in range(33)], DRAW)
    together, _ = native.sample(logits, records)
    queries = np.array([(i, int(together[i])) for i in range(33)], QUERY)
    scores, ids, logprobs = native.top_logprobs(logits, queries, 20)
    one = select(DeviceConfig(device="cpu", threads=1))
    for i in range(33):
        alone = logits[i : i + 1].clone()
        assert one.sample(alone, np.array([draw_record(0, 9, i, **options)], DRAW))[0][0] == together[i]
        score, best, values = one.top_logprobs(alone, np.array([(0, int(together[i]))], QUERY), 20)
        assert score.tobytes() == scores[i : i + 1].tobytes()
        assert best.tobytes() == ids[i].tobytes() and values.tobytes() == logprobs[i].tobytes()
    select(DeviceConfig(device="cpu", threads=2))


@BACKENDS
def test_penalties_by_definition(ops: Ops) -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    seen = (np.array([0, 1, 4], np.int32), np.array([2, 1, 0], np.int32))
    ops.penalize(logits, [RowEdits(0, seen=seen, repetition=2.0, frequency=0.5, presence=0.25)])
    # divided or multiplied by 2; minus 0.5 per occurrence in the output and 0.25 for having occurred
    assert logits[0].tolist() == [1.0 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 1.0, 0.0, 2.5]
    assert logits[1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    bias = (np.array([4], np.int32), np.array([-3.0], np.float32))
    allowed, banned = np.array([1, 3, 4], np.int32), np.array([3], np.int32)
    ops.penalize(logits, [RowEdits(1, allowed, banned, bias)])
    assert logits[1].tolist() == [-math.inf, 2.0, -math.inf, -math.inf, 2.0]


@BACKENDS
def test_masks_do_not_hide_broken_logits(ops: Ops) -> None:
    logits = torch.zeros((2, 10))
    logits[0, 3], logits[1, 4] = math.nan, math.inf
    only = np.array([1], np.int32)
    ops.penalize(logits, [RowEdits(0, allowed=only), RowEdits(1, banned=np.array([4], np.int32))])
    assert ops.sample(logits, np.array([draw_record(0), draw_record(1)], DRAW))[1].tolist() == [NOT_FINITE] * 2


@BACKENDS
def test_top_logprobs_by_definition(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 0.5]])
    scores, ids, logprobs = ops.top_logprobs(logits, np.array([(0, 2), (0, 4)], QUERY), 5)
    exact = logits[0].double().log_softmax(0)
    assert scores["rank"].tolist() == [2, 4]
    assert scores["logprob"] == pytest.approx(exact[[2, 4]].tolist(), rel=1e-6)
    assert ids[0].tolist() == [1, 2, 0, 4, -1]
    assert logprobs[0, :4] == pytest.approx(exact[[1, 2, 0, 4]].tolist(), rel=1e-6)


@BACKENDS
def test_targets_may_be_places_among_what_was_drawn(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.5], [math.nan, 1.0, 2.0, 3.0], [4.0, 1.0, 2.0, 3.0]])
    tokens, flags = ops.sample(logits, np.array([draw_record(row, temperature=0.0) for row in (2, 1, 0)], DRAW))
    assert tokens.tolist() == [0, -1, 1] and flags.tolist() == [0, NOT_FINITE, 0]
    queries = np.array([(0, -3), (1, -2), (2, -1), (2, 3)], QUERY)
    scores, _, _ = ops.top_logprobs(logits, queries, 1, tokens)
    known, _, _ = ops.top_logprobs(logits, np.array([(0, 1), (1, 0), (2, 0), (2, 3)], QUERY), 1)
    assert scores["flags"].tolist() == [0, NOT_FINITE, 0, 0]
    assert [scores[i].tobytes() for i in (0, 2, 3)] == [known[i].tobytes() for i in (0, 2, 3)]
    assert queries["target"].tolist() == [-3, -2, -1, 3], "the caller's records stay as they are"


def test_native_refuses_what_lies_outside() -> None:
    logits = torch.zeros((2, 10))
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="row"):
            native.sample(logits, np.array([draw_record(bad)], DRAW))
        with pytest.raises(ValueError, match="row"):
            native.top_logprobs(logits, np.array([(bad, 0)], QUERY), 1)
        with pytest.raises(ValueError, match="row"):
            native.penalize(logits, [RowEdits(bad)])
    for bad in (-1, 10):
        with pytest.raises(ValueError, match="target"):
            native.top_logprobs(logits, np.array([(0, bad)], QUERY), 1)
        with pytest.raises(ValueError, match="token id"):
            native.penalize(logits, [RowEdits(0, banned=np.array([bad], np.int32))])
    with pytest.raises(ValueError, match="float32"):
        native.sample(logits.double(), np.array([draw_record(0)], DRAW))
    with pytest.raises(ValueError, match="int32"):
        native.penalize(logits, [RowEdits(0, banned=np.array([1]))])
    with pytest.raises(ValueError, match="two edits"):
        native.penalize(logits, [RowEdits(0), RowEdits(0)])
