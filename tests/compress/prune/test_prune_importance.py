"""A structure's score is what the numbers that go with it sum to; the best are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pruned_checkpoints import checkpoint, layers_of, read
from quire.compress.prune.scores import (
    channel_scores,
    head_scores,
    input_scores,
    keep_best,
    keep_groups,
    layer_scores,
    taylor,
)
from quire.compress.prune.structured import drop_channels, drop_heads
from quire.core.errors import ConfigError, ModelError


def total(tensors: dict[str, Tensor], kinds: tuple[str, ...]) -> float:
    """The sum of all layers' tensors whose name has one of `kinds`."""
    return sum(float(t.double().sum()) for name, t in tensors.items() if any(kind in name for kind in kinds))


@pytest.mark.parametrize("variant", ["llama_biases", "gpt2", "gpt_neox", "phi3", "gemma3"])
def test_channels_count_all_that_goes_with_them(variant: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, variant)
    tensors, config = read(tmp_path)
    elements = {name: t.abs() for name, t in tensors.items()}
    scores = channel_scores(elements, config)
    keep = keep_best(scores, 40)
    made, _ = drop_channels(elements, config, keep)
    lost = total(elements, ("mlp",)) - total(made, ("mlp",))
    gone = sum(float(s.double().sum() - s.double()[k].sum()) for s, k in zip(scores, keep, strict=True))
    assert len(scores) == 3 and gone == pytest.approx(lost, rel=1e-5) and gone > 0


@pytest.mark.parametrize("variant", ["llama_biases", "phi3", "qwen3"])
def test_heads_count_all_that_goes_with_them(variant: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, variant)
    tensors, config = read(tmp_path)
    elements = {name: t.abs() for name, t in tensors.items()}
    scores = head_scores(elements, config)
    keep = keep_groups(scores, 2, 1)
    made, _ = drop_heads(elements, config, keep)
    lost = total(elements, ("self_attn",)) - total(made, ("self_attn",))
    gone = sum(float(s.double().sum() - s.double()[k].sum()) for s, k in zip(scores, keep, strict=True))
    assert len(scores[0]) == 4 and gone == pytest.approx(lost, rel=1e-5) and gone > 0


@pytest.mark.parametrize(("variant", "query"), [("gpt2", "c_attn"), ("gpt_neox", "query_key_value")])
def test_heads_of_fused_matrices_are_those_that_transformers_cuts(variant: str, query: str, tmp_path: Path) -> None:
    """Only what belongs to head 2 has a gradient when the loss reads head 2's part of the attention's output."""
    oracle = checkpoint(tmp_path, variant)
    _, config = read(tmp_path)
    seen: list[Tensor] = []
    out = next(m for n, m in layers_of(oracle)[1].named_modules() if n in ("attn.c_proj", "attention.dense"))
    out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    oracle(torch.arange(3, 12)[None], use_cache=False)
    weights = {name: p for name, p in oracle.named_parameters() if query in name and ".1." in name}
    grads = torch.autograd.grad(seen[0][..., 32:48].square().sum(), list(weights.values()))
    elements = {name: torch.zeros_like(t) for name, t in read(tmp_path)[0].items()}
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        own = next(n for n in elements if name.endswith(n) or n.endswith(name))
        elements[own] = taylor(weight.detach(), grad)
    scores = head_scores(elements, config)
    assert scores[1][2] > 0 and (scores[1][[0, 1, 3]] == 0).all()
    assert (scores[0] == 0).all() and (scores[2] == 0).all()


def test_inputs_are_scored_by_unit() -> None:
    torch.manual_seed(0)
    x, g = {1: torch.randn(5, 6), 0: torch.randn(4, 6)}, {0: torch.randn(4, 6), 1: torch.randn(5, 6)}
    want = [[sum(abs(float(a * b)) for t in range(len(x[i])) for a, b in zip(x[i][t, u * 2 : u * 2 + 2],
             g[i][t, u * 2 : u * 2 + 2], strict=True)) / len(x[i]) for u in range(3)] for i in range(2)]  # fmt: skip
    for got, layer in zip(input_scores(x, g, 3), want, strict=True):
        assert got.tolist() == pytest.approx(layer, rel=1e-5)
    with pytest.raises(ConfigError, match=r"layers \[0\] do not fit activations of \[0, 1\]"):
        input_scores(x, {0: g[0]}, 3)


def test_a_layer_that_turns_nothing_goes_first() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(9, 8), torch.randn(9, 8)
    scores = layer_scores([first, 2 * first, second, second + 0.1 * first])
    assert scores[0] == pytest.approx(0, abs=1e-6)
    assert keep_best([scores], 2) == [[1, 2]] and keep_best([scores], 1) == [[1]]


def test_among_equals_the_first_stay() -> None:
    ones = torch.ones(6)
    assert keep_best([ones, torch.arange(6.0)], 2) == [[0, 1], [4, 5]]
    assert keep_groups([ones, torch.tensor([5.0, 0, 3, 3, 0, 0])], 3, 1) == [[0, 1], [2, 3]]
    for count in (0, 7):
        with pytest.raises(ConfigError, match="from 1 to 6"):
            keep_best([ones], count)


def test_experts_have_no_channels_to_score(tmp_path: Path) -> None:
    checkpoint(tmp_path, "mixtral")
    with pytest.raises(ModelError, match="experts"):
        channel_scores(*read(tmp_path))
    assert len(head_scores(*read(tmp_path))) == 3
