"""Drafts that no model makes: from a sequence's own tokens, and from earlier outputs of its tenant."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import request
from quire.core.plan import Chunk, StepPlan
from quire.core.sequence import Sequence, Status
from quire.core.speculation import Speculation
from quire.speculate import suffix
from quire.speculate.ngram import NGram
from quire.speculate.ngram_index import CANDIDATES, NGramIndex, NGramMatch, TokenRow
from quire.speculate.suffix import RecentOutputs, SuffixDecoding, likeliest


def matches_by_hand(rows: list[list[int]], order: list[tuple[int, int]], own: int, least: int, most: int) -> list[int]:
    """Lengths of what ends row `own` in the latest places where its last `least` tokens were; `order`: (row, end)."""
    tokens = rows[own]
    places = [(r, end) for r, end in order if end >= least and rows[r][end - least : end] == tokens[-least:]]
    found = []
    for r, end in [place for place in reversed(places) if place != (own, len(tokens))][:CANDIDATES]:
        length = 0
        while length < min(most, end, len(tokens)) and rows[r][end - 1 - length] == tokens[-1 - length]:
            length += 1
        found.append(length)
    return sorted(found, reverse=True)


@given(st.integers(1, 3), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=120))
@settings(max_examples=300, deadline=None)
def test_the_longest_runs_are_found(least: int, more: int, appended: list[tuple[int, int]]) -> None:
    """Three rows grow in turns; after every token the matches of its row are those found by comparing everything."""
    most = least + more
    runs, rows, order = NGramIndex(least, most), [TokenRow([]) for _ in range(3)], list[tuple[int, int]]()
    for which, token in appended:
        row = rows[which]
        row.tokens.append(token)
        runs.read(row)
        order.append((which, len(row.tokens)))
        if len(row.tokens) < least:
            continue
        found = runs.matches(row)
        assert [match.length for match in found] == matches_by_hand([r.tokens for r in rows], order, which, least, most)
        for length, where, end in found:
            assert where.tokens[:end][-length:] == row.tokens[-length:]
        assert all(match.row is not row for match in runs.matches(row, within=False))


def test_what_is_forgotten_is_not_found() -> None:
    runs, rows = NGramIndex(2, 4), [TokenRow([1, 2, 3, 1, 2]), TokenRow([5, 1, 2]), TokenRow([1, 2])]
    for row in rows:
        runs.read(row)
    assert [match.row for match in runs.matches(rows[2])] == [rows[1], rows[0], rows[0]]
    runs.forget(rows[0])
    assert [match.row for match in runs.matches(rows[2])] == [rows[1]]
    runs.forget(rows[1])
    assert runs.matches(rows[2]) == [] and runs.matches(rows[1]) == [] and not rows[1].tokens
    runs.forget(rows[2])
    assert not runs._newest, "nothing stays of rows that are gone"


def test_what_is_copied_goes_on_repeating() -> None:
    seq = Sequence(request("r", [5, 1, 2, 3, 1, 2, 3], 9))
    NGram(2, 8).propose([seq], [7])
    assert seq.draft.tokens == [1, 2, 3, 1, 2, 3, 1]
    NGram(2, 8).propose([other := Sequence(request("s", [4, 5, 6], 9))], [3])
    assert other.draft.tokens == []


def test_what_followed_most_often_is_drafted_while_it_is_likely() -> None:
    rows = [TokenRow([1, 2, 7, 8, 9]), TokenRow([1, 2, 7, 8, 4]), TokenRow([1, 2, 7, 5]), TokenRow([2, 6, 6])]
    matches = [NGramMatch(2, row, 2) for row in rows[:3]] + [NGramMatch(1, rows[3], 1)]
    assert likeliest(matches, 9, 0.5) == ([7, 8], 1 + 2 / 3)
    tokens, expected = likeliest(matches, 9, 0.0)
    assert tokens[:2] == [7, 8] and tokens[2] in (4, 9) and expected == pytest.approx(1 + 2 / 3 + 1 / 3)
    assert likeliest(matches, 1, 0.0) == ([7], 1.0)
    assert likeliest([NGramMatch(3, TokenRow([1, 2, 3]), 3)], 4, 0.0) == ([], 0.0), "nothing came after it"


def sequence(name: str, prompt: list[int], tenant: str = "") -> Sequence:
    return Sequence(request(name, prompt, 99, salt=tenant))


def answered(proposer: SuffixDecoding, seq: Sequence, output: list[int]) -> None:
    """`seq` puts out these, a step at a time, and ends."""
    seq.status = Status.RUNNING
    for token in output:
        proposer.computed(StepPlan(chunks=(Chunk(seq, len(seq.tokens) - 1, 1, 1),)), follow=False)
        seq.tokens.append(token)
    seq.status = Status.FINISHED


def test_what_another_answer_of_the_tenant_said_is_drafted() -> None:
    proposer = SuffixDecoding(Speculation(method="suffix"))
    answered(proposer, sequence("a", [1, 2, 3], "me"), [4, 5, 6, 7, 8, 9])
    same, other = sequence("b", [9, 2, 3], "me"), sequence("c", [1, 2, 3], "you")
    same.tokens += [4, 5]
    other.tokens += [4, 5]
    proposer.propose([same, other], [8, 8])
    assert same.draft.tokens == [6, 7, 8, 9], "a run of four tokens lets four be guessed"
    assert other.draft.tokens == [], "tenants do not see each other's answers"
    proposer.propose([same], [2])
    assert same.draft.tokens == [6, 7]


def test_as_many_tokens_are_drafted_as_the_run_is_long() -> None:
    for factor, want in ((1.0, 2), (2.0, 4), (0.5, 1)):
        proposer = SuffixDecoding(Speculation(method="suffix", suffix_decoding_max_spec_factor=factor))
        answered(proposer, sequence("a", [1, 2], "me"), [3, 4, 5, 6, 7, 8])
        seq = sequence("b", [9, 3, 4], "me")
        proposer.propose([seq], [8])
        assert seq.draft.tokens == [5, 6, 7, 8][:want]


def test_branches_of_the_prompt_and_of_outputs_share_a_tree() -> None:
    proposer = SuffixDecoding(Speculation(method="suffix", topk=2, num_draft_tokens=8, num_speculative_tokens=3))
    answered(proposer, sequence("a", [1], "me"), [3, 4, 5, 6])
    seq = sequence("b", [3, 4, 5, 9, 3, 4], "me")
    proposer.propose([seq], [8])
    assert seq.draft.tokens[0] == 5 and sorted(seq.draft.tokens[1:]) == [6, 9] and seq.draft.parents == [-1, 0, 0]


def test_few_outputs_are_remembered_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = RecentOutputs(2, 4, 3)
    seqs = [sequence(f"r{i}", [i, i], f"tenant{i % 2}") for i in range(6)]
    for seq in seqs:
        outputs.follow(seq)
        seq.tokens += [50, 51, 52]
        outputs.matches(seq)
    assert list(outputs._live) == seqs and len(outputs._rows) == 3
    assert outputs.held == 15 and {len(runs) for runs in outputs._tenants.values()} == {1, 2}
    assert outputs.matches(seqs[0]) == [], "it was forgotten while it went on"
    for seq in seqs:
        seq.status = Status.FINISHED
    monkeypatch.setattr(suffix, "MOST_HELD", 5)
    outputs.settle()
    assert not outputs._live and outputs.held == 5 and len(outputs._tenants) == 1
    assert RecentOutputs(2, 4, 0).matches(sequence("x", [1, 2])) == [], "none is asked for"


def test_whatever_comes_a_draft_is_of_tokens_that_were_there() -> None:
    """Sequences begin, go on and end at random; what is held stays within bounds, and nothing of the ended stays."""
    rng = random.Random(3)
    proposer = SuffixDecoding(Speculation(method="suffix", suffix_decoding_max_cached_requests=5))
    live: list[Sequence] = []
    for step in range(600):
        if len(live) < 4 and rng.random() < 0.3:
            live.append(sequence(f"r{step}", [rng.randrange(3) for _ in range(6)], rng.choice("ab")))
        proposer.computed(StepPlan(chunks=tuple(Chunk(seq, len(seq.tokens) - 1, 1, 1) for seq in live)), follow=False)
        proposer.propose(live, [4] * len(live))
        for seq in list(live):
            assert len(seq.draft.tokens) <= 4 and set(seq.draft.tokens) <= {0, 1, 2}
            seq.draft.tokens = []
            seq.tokens.append(rng.randrange(3))
            if rng.random() < 0.05:
                seq.status = Status.FINISHED
                live.remove(seq)
        outputs = proposer.outputs
        assert len(outputs._rows) <= 5 and sum(len(runs) for runs in outputs._tenants.values()) == len(outputs._rows)
        assert outputs.held == sum(len(row.tokens) for row in outputs._rows)
