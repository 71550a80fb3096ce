"""Scores of heads, channels and layers from what was collected of a model, and which of them to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.compress.prune.onfile import PrunableCheckpoint
from quire.compress.prune.scores import activation_gradient, block_influence, sum_by_unit, sum_coupled
from quire.core.errors import ConfigError
from quire.model.mixers.table import own_heads
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def channel_scores(elements: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[Tensor]:
    """Of each layer [intermediate] f32: the sum of `elements` over what goes with a channel.

    `elements`: a score for each number of a checkpoint, by name and in the shape of its tensors (LLM-Pruner, Ma et al.
    2023: `taylor` of each tensor). With a channel go its rows of up and gate, their biases and its column of down.
    `ModelError` when the model has experts, or as of `PrunableCheckpoint.of`.
    """
    model = PrunableCheckpoint.of(elements, config)
    if any(model.spec.moe.sparse):
        raise model.refuse("channels of experts cannot be dropped")
    made, width = [], model.spec.intermediate
    for layer in range(model.spec.layers):
        rows = [_outputs(model, role, layer, width) for role in ("gate", "up") if _has(model, role, layer)]
        made.append(sum_coupled([*rows, _inputs(model, "down", layer, width)]))
    return made


def head_scores(elements: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[Tensor]:
    """Of each layer [heads] f32: the sum of `elements`, as in `channel_scores`, over what goes with a query head.

    These are its rows of q with their bias and its columns of o, and its even part of the rows of the key and value
    that it reads. `ModelError` when the model has latents, or as of `PrunableCheckpoint.of`.
    """
    model = PrunableCheckpoint.of(elements, config)
    spec, made = model.spec, []
    if not own_heads(spec):
        raise model.refuse("heads over latents cannot be dropped")
    group = spec.heads // spec.kv_heads
    for layer in range(spec.layers):
        pairs = sum_coupled(_outputs(model, role, layer, spec.kv_heads) for role in ("k", "v"))
        own = _outputs(model, "q", layer, spec.heads), _inputs(model, "o", layer, spec.heads)
        made.append(sum_coupled([*own, pairs.repeat_interleave(group) / group]))
    return made


def input_scores(activations: Mapping[int, Tensor], gradients: Mapping[int, Tensor], units: int) -> list[Tensor]:
    """Of each layer, in order, [units] f32: `activation_gradient` of a matrix's inputs, summed over each unit's.

    Both: layer -> [rows, k], of the inputs of o for heads, of down for channels. `ConfigError` when layers are missing
    from one or the shapes do not fit.
    """
    if activations.keys() != gradients.keys():
        raise ConfigError(f"gradients of layers {sorted(gradients)} do not fit activations of {sorted(activations)}")
    return [sum_by_unit(activation_gradient(activations[i], gradients[i])[None], units, 1) for i in sorted(activations)]


def layer_scores(hidden: Sequence[Tensor]) -> Tensor:
    """[layers] f64: the block influence (ShortGPT, Men et al. 2024) of each layer.

    `hidden`: layers + 1 tensors [rows, hidden], the stream before each layer and after the last.
    """
    return torch.tensor([block_influence(*pair) for pair in pairwise(hidden)], dtype=torch.float64)


def keep_best(scores: Sequence[Tensor], count: int) -> list[list[int]]:
    """Of each vector of scores the `count` largest, as ascending numbers; among equals the smaller number stays.

    `ConfigError` when there are not as many, or none would stay.
    """
    most = min(len(s) for s in scores)
    if not 0 < count <= most:
        raise ConfigError(f"{count} of {most} cannot be kept; keep from 1 to {most}")
    return [sorted(s.sort(descending=True, stable=True).indices[:count].tolist()) for s in scores]


def keep_groups(scores: Sequence[Tensor], kv_heads: int, count: int) -> list[list[int]]:
    """Of each layer's heads those that read the `count` key/value heads with the largest sums of `scores` [heads].

    `ConfigError` when heads do not divide by `kv_heads`, or as of `keep_best`.
    """
    kept, group = keep_best([sum_by_unit(s, kv_heads) for s in scores], count), len(scores[0]) // kv_heads
    return [[g * group + i for g in layer for i in range(group)] for layer in kept]


def _has(model: PrunableCheckpoint, role: str, layer: int) -> bool:
    return bool(model.name(model.claim.holder(role, layer), layer))


def _outputs(model: PrunableCheckpoint, role: str, layer: int, units: int) -> Tensor:
    """[units]: what a role's rows and their biases sum to."""
    holder, rows = model.rows(role, layer)
    matrix, bias = model.tensors[model.name(holder, layer)], model.name(holder, layer, "bias")
    total = sum_by_unit(matrix.index_select(model.axis(0), rows), units, model.axis(0))
    return total + sum_by_unit(model.tensors[bias][rows], units) if bias else total


def _inputs(model: PrunableCheckpoint, role: str, layer: int, units: int) -> Tensor:
    return sum_by_unit(model.tensors[model.name(role, layer)], units, model.axis(1))
