"""Drafts that branch: how a tree grows, what its rows are, and that what was kept lies where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_answers import engine_of
from fake_runner import request
from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from oracle import BACKENDS, write
from over_torch import select
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.plan import LogitRow
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm, parse_speculation
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.ops.reference.caches import allocate
from quire.ops.reference.caches import write as write_cache
from quire.run.builder import ancestors
from quire.sample.sampler import Sampler
from quire.sched.growth import moves
from quire.speculate.draft_length import _chances
from quire.speculate.ngram import NGram
from quire.speculate.tree import Candidates, Tree, grow_trees
from speculation_methods import PYDOC, write_words
from turns import working

KV_TYPES = (F32, F16, BF16, I8, F8)


def drafted(tokens: list[int], parents: list[int]) -> Sequence:
    seq = Sequence(request("r", [1, 2, 3], 30))
    seq.draft.tokens, seq.draft.parents = tokens, parents
    return seq


def test_a_branch_is_what_a_node_follows() -> None:
    seq = drafted([5, 6, 7, 8, 9], [-1, -1, 0, 1, 2])
    assert [seq.draft.branch(node) for node in range(-1, 5)] == [[], [0], [1], [0, 2], [1, 3], [0, 2, 4]]
    assert (
        seq.draft.matching_child(-1, 6),
        seq.draft.matching_child(0, 7),
        seq.draft.matching_child(0, 8),
        seq.draft.matching_child(1, 8),
    ) == (1, 2, None, 3)
    masks, depths = ancestors(seq.draft.parents)
    assert masks.tolist() == [0b1, 0b10, 0b101, 0b1010, 0b10101] and depths.tolist() == [0, 0, 1, 1, 2]
    chain = drafted([5, 6], [])
    assert chain.draft.branch(1) == [0, 1]
    assert [chain.draft.matching_child(*asked) for asked in ((-1, 5), (0, 6), (1, 6))] == [0, 1, None]


def test_kept_nodes_move_to_where_the_only_draft_would_lie() -> None:
    seq = drafted([5, 6, 7, 8, 9], [-1, -1, 0, 1, 2])
    seq.kv.blocks = [[4, 9, 2], [7, 1, 3]]
    assert moves(seq, [0, 2, 4], 4) == [(37, 36, 0), (39, 37, 0), (5, 4, 1), (7, 5, 1)]
    assert moves(seq, [0], 4) == [] == moves(drafted([5, 6], []), [0, 1], 4)


def likely(tokens: list[list[int]], chances: list[list[float]]) -> Candidates:
    return Candidates(np.array(tokens, np.int32), np.array(chances))


def test_a_tree_grows_where_it_is_likely() -> None:
    """After the two likeliest of a depth two are tried each; the three likeliest of all stand."""
    seq, asked = drafted([], []), []

    def candidates(seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        asked.append((list(seq.draft.tokens), list(seq.draft.parents), counts))
        if len(asked) == 1:
            return [likely([[10, 11]], [[0.7, 0.2]])]
        return [likely([[20, 21], [22, 23]], [[0.5, 0.4], [0.9, -1]])]

    grow_trees(TreeForm(2, 2, 3), [(seq, 3)], candidates)
    assert asked == [([], [], [1]), ([10, 11], [-1, -1], [2])]
    assert (seq.draft.tokens, seq.draft.parents) == ([10, 20, 21], [-1, 0, 0])  # 0.7, 0.35, 0.28; 11 has 0.2


def test_a_tree_of_a_given_form_has_that_form() -> None:
    form = parse_speculation(
        '{"method": "self", "layers": 1, "speculative_token_tree": "[(0,), (1,), (1, 2), (0, 0), (0, 0, 1)]"}',
        None,
        None,
    )
    assert form is not None and form.tree is not None and (form.tokens, form.nodes) == (3, 5)
    tree = Tree(form.tree, 5)
    tree.grow(likely([[10, 11, 12]], [[0.5, 0.3, 0.2]]))
    assert tree.frontier == [0, 1]
    tree.grow(likely([[20, 21, 22], [23, 24, 25]], [[0.5, 0.3, 0.2]] * 2))
    tree.grow(likely([[30, 31, 32]], [[0.5, 0.3, 0.2]]))
    seq = drafted([], [])
    tree.write(seq, final=True)
    tokens, branch = seq.draft.tokens, seq.draft.branch
    assert {(tokens[node], *(tokens[at] for at in branch(node)[:-1])) for node in range(5)} == {
        (10,), (11,), (25, 11), (20, 10), (31, 10, 20)}  # fmt: skip


@given(st.data())
def test_a_tree_is_in_order_and_within_its_bounds(data: st.DataObject) -> None:
    form = TreeForm(data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4)), data.draw(st.integers(1, 20)))
    most = data.draw(st.integers(1, form.nodes))
    seq = drafted([], [])

    def candidates(seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        chances = data.draw(st.lists(st.floats(0, 1), min_size=counts[0] * form.topk, max_size=counts[0] * form.topk))
        ids = np.arange(counts[0] * form.topk, dtype=np.int32).reshape(counts[0], -1)
        assert len(seq.draft.tokens) <= most
        return [Candidates(ids % form.topk, np.array(chances).reshape(ids.shape))]

    grow_trees(form, [(seq, most)], candidates)
    assert len(seq.draft.tokens) == len(seq.draft.parents) <= most
    assert all(parent < node for node, parent in enumerate(seq.draft.parents))
    assert all(len(seq.draft.branch(node)) <= form.depth for node in range(len(seq.draft.tokens)))
    assert len({(p, t) for p, t in zip(seq.draft.parents, seq.draft.tokens, strict=True)}) == len(seq.draft.tokens), (
        "a token twice"
    )


def test_continuations_share_their_beginning() -> None:
    """What followed 1, 2 before: 5 6 7 after the longer run, then 5 8 and 9."""
    seq = Sequence(request("r", [1, 2, 9, 4, 1, 2, 5, 8, 3, 1, 2, 5, 6, 7, 3, 1, 2], 9))
    NGram(2, 8, TreeForm(3, 4, 6)).propose([seq], [6])
    assert (seq.draft.tokens, seq.draft.parents) == ([5, 6, 7, 8, 3, 9], [-1, 0, 1, 0, 3, -1])
    assert _chances(seq, 0.8) == pytest.approx([0.8, 0.64, 0.512, 0.128, 0.1024, 0.16])
    seq.draft.prune([0, 1, 5])
    assert (seq.draft.tokens, seq.draft.parents) == ([5, 6, 9], [-1, 0, -1])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_runners_up_are_what_would_come_without_the_first(temperature: float) -> None:
    ops = select(DeviceConfig(device="cpu"))
    logits = torch.randn((2, 300), generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(max_tokens=9, temperature=temperature, presence_penalty=0.5)
    seq = Sequence(Request(id="r", prompt=(1, 2), params=params, seed=5, arrival=0.0))
    seq.tokens += [7, 8]
    seq.draft.tokens = [9]
    rows = [LogitRow(seq, 4), LogitRow(seq, 5, None, 0)]
    sampler = Sampler(ops, 300)
    tokens, chances = sampler.best(logits.clone(), rows, 4)
    left = logits.clone()
    for rank in range(4):
        assert sampler.tokens(left.clone(), rows) == tokens[:, rank].tolist()
        left[[0, 1], tokens[:, rank].tolist()] = -torch.inf
    assert (np.diff(chances, axis=1) <= 0).all() and (chances > 0).all() and (chances.sum(1) < 1 + 1e-6).all()


@pytest.mark.parametrize("config", [
    {"method": "self", "quantization": "int4", "topk": 0}, {"method": "ngram", "num_draft_tokens": 8},
    {"method": "self", "quantization": "int4", "topk": 2, "num_draft_tokens": 64},
    {"method": "medusa", "model": "x", "speculative_token_tree": "[(0, 1)]"},
    {"method": "medusa", "model": "x", "speculative_token_tree": "[(0,), 'x']"},
    {"method": "medusa", "model": "x", "speculative_token_tree": "[]"},
    {"method": "medusa", "model": "x", "speculative_token_tree": "[(0,)]", "num_speculative_tokens": 2},
])  # fmt: skip
def test_a_tree_that_cannot_be_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"topk|num_draft_tokens|speculative_token_tree"):
        parse_speculation(json.dumps(config), None, None)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
def test_trees_over_latents_are_refused(tmp_path: Path) -> None:
    sizes = SIZES | GROUPS | {"q_lora_rank": 32, "v_head_dim": 16}
    write(tmp_path, "deepseek_v3", **sizes | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    write_words(tmp_path, 99)
    asked = {"method": "self", "layers": 1, "topk": 2}
    with pytest.raises(ConfigError, match="latent"):
        engine_of(model=str(tmp_path), speculative_config=json.dumps(asked))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
def test_a_tree_keeps_more_than_its_first_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model at fewer bits, where tokens are drawn: kept tokens of other branches are moved."""
    asked = {"method": "self", "quantization": "int4", "topk": 3, "num_speculative_tokens": 4, "adaptive": False}
    engine, moved = engine_of(model=PYDOC, speculative_config=json.dumps(asked)), []
    blocks = engine.engine.runner.caches
    move = blocks.move
    monkeypatch.setattr(blocks, "move", lambda moves: moved.append(moves) or move(moves))
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    for i in range(4):
        engine.submit(Request(id=f"r{i}", prompt=(5, 9, 40 + i), params=params, seed=i, arrival=0.0))
    for _ in working(engine.engine):
        engine.poll(0)
    assert engine.engine.speculator is not None
    totals = engine.engine.speculator.totals
    assert sum(map(len, moved)) > 10 and totals.accepted > totals.drafts, (moved, totals)


@pytest.fixture(params=[name for name in ("reference", "cpu") if name in BACKENDS or name == "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(DeviceConfig(device=request.param))


@pytest.mark.parametrize("dtype", KV_TYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_a_moved_token_lies_as_if_it_were_written_there(ops: Ops, block_size: int, dtype: Dtype) -> None:
    layout = ops.layout(block_size, 2, 16, dtype)
    count = 4 * block_size
    k, v = (torch.randn((count, 2, 16), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    scattered = torch.arange(count) if block_size > 1 else torch.arange(4)
    nodes = [node for node in range(count // 2, count) if node % 3 != 1]
    moved, plain = allocate(layout, 5), allocate(layout, 5)
    write_cache(moved, scattered, k, v)
    write_cache(plain, scattered, k, v)
    ops.begin_step()
    ops.move_slots([moved], tuple(zip(nodes, range(len(nodes)), strict=True)))
    write_cache(plain, torch.arange(len(nodes)), k[nodes], v[nodes])
    assert same(moved, plain)
    with pytest.raises((ValueError, IndexError)):
        ops.move_slots([moved], ((0, 5 * block_size),))


def same(a: KVCache, b: KVCache) -> bool:
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in ((a.keys, b.keys), (a.values, b.values))
    )
