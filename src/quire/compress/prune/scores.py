"""Importance scores of weights, heads, channels and layers, and the choice of those that stay.

The larger a score, the more is lost when its weight goes. Scores are functions of matrices [n, k] (n outputs, k inputs)
and of statistics of what flows through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.compress.prune.prunable import PrunableCheckpoint
from quire.core.errors import ConfigError
from quire.model.mixers.layer_mixers import own_heads
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """Score weights by |w| of `weight` [n, k], f32."""
    return weight.float().abs()


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """Score weights by |w| * ||x|| [n, k] f32 (Sun et al. 2024), to be compared within a row.

    `norms` [k]: L2 norms of the inputs. `ConfigError` when there is not one norm per column.
    """
    _expect(norms.shape == weight.shape[1:], f"norms {list(norms.shape)}", f"a matrix {list(weight.shape)}")
    return weight.float().abs() * norms.float()


def taylor(weight: Tensor, gradient: Tensor) -> Tensor:
    """Score weights by |w * dL/dw| [n, k] f32: how the loss changes, to first order, when one goes (LLM-Pruner).

    Ma et al. 2023. `ConfigError` when `gradient` has another shape than `weight`.
    """
    _expect(gradient.shape == weight.shape, f"a gradient {list(gradient.shape)}", f"a matrix {list(weight.shape)}")
    return (weight.float() * gradient.float()).abs()


def activation_gradient(activations: Tensor, gradients: Tensor) -> Tensor:
    """Score channels [k] f32 by the mean over rows of |x * dL/dx|, both [rows, k]: how the loss changes when one reads
    0.

    Molchanov et al. 2017. `ConfigError` when the shapes differ or there are no rows.
    """
    what = f"activations {list(activations.shape)}"
    _expect(activations.shape == gradients.shape, f"gradients {list(gradients.shape)}", what)
    _expect(len(activations) > 0, what, "a mean over rows")
    return (activations.float() * gradients.float()).abs().mean(0)


def block_influence(before: Tensor, after: Tensor) -> float:
    """Score a layer by 1 - mean cosine between its input and output rows, both [rows, hidden] (ShortGPT, Men et al.
    2024).

    From 0 (the layer turns no row) to 2. A row of zeros counts as turned by a right angle. `ConfigError` when the
    shapes differ or there are no rows.
    """
    _expect(before.shape == after.shape, f"rows {list(after.shape)}", f"rows {list(before.shape)}")
    _expect(len(before) > 0, f"rows {list(before.shape)}", "a mean over rows")
    return 1.0 - float(torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean())


def sum_by_unit(scores: Tensor, units: int, axis: int = 0) -> Tensor:
    """Sum `scores` [n, k] over the slices of each unit, [units] f32; slices are consecutive along `axis`.

    A head's rows of q (axis 0) or columns of o (axis 1), for example. `ConfigError` when the axis has no whole number
    of numbers per unit.
    """
    count = scores.shape[axis]
    _expect(units > 0 and count % units == 0, f"{units} units", f"an axis of {count}")
    return scores.float().movedim(axis, 0).reshape(units, -1).sum(1)


def sum_coupled(scores: Iterable[Tensor]) -> Tensor:
    """Sum the scores [units] of matrices whose slices go together: LLM-Pruner's coupled group.

    `ConfigError` when there are none, or they count different units.
    """
    parts = list(scores)
    _expect(len({len(p) for p in parts}) == 1, f"scores of {[len(p) for p in parts]} units", "one group")
    return torch.stack(parts).sum(0)


def _expect(holds: bool, what: str, other: str) -> None:
    if not holds:
        raise ConfigError(f"pruning: {what} do not fit {other}; give those of the same matrix and the same rows")


def channel_scores(elements: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[Tensor]:
    """Score the MLP channels of each layer, [intermediate] f32: the sum of `elements` over what goes with a channel.

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
    """Score the query heads of each layer, [heads] f32: the sum of `elements`, as in `channel_scores`, over each head.

    A head is its rows of q with their bias and its columns of o, and its even part of the rows of the key and value
    that it reads. `ModelError` when the model has latents, or as of `PrunableCheckpoint.of`.
    """
    model = PrunableCheckpoint.of(elements, config)
    spec, made = model.spec, []
    if not own_heads(spec):
        raise model.refuse("heads over latents, or of some layers only, cannot be dropped")
    group = spec.heads // spec.kv_heads
    for layer in range(spec.layers):
        pairs = sum_coupled(_outputs(model, role, layer, spec.kv_heads) for role in ("k", "v"))
        own = _outputs(model, "q", layer, spec.heads), _inputs(model, "o", layer, spec.heads)
        made.append(sum_coupled([*own, pairs.repeat_interleave(group) / group]))
    return made


def input_scores(activations: Mapping[int, Tensor], gradients: Mapping[int, Tensor], units: int) -> list[Tensor]:
    """Score units of each layer, in order, [units] f32: `activation_gradient` of a matrix's inputs, summed over each
    unit's.

    Both: layer -> [rows, k], of the inputs of o for heads, of down for channels. `ConfigError` when layers are missing
    from one or the shapes do not fit.
    """
    if activations.keys() != gradients.keys():
        raise ConfigError(f"gradients of layers {sorted(gradients)} do not fit activations of {sorted(activations)}")
    return [sum_by_unit(activation_gradient(activations[i], gradients[i])[None], units, 1) for i in sorted(activations)]


def layer_scores(hidden: Sequence[Tensor]) -> Tensor:
    """Score layers, [layers] f64, by the block influence of each (ShortGPT, Men et al. 2024).

    `hidden`: layers + 1 tensors [rows, hidden], the hidden states before each layer and after the last.
    """
    return torch.tensor([block_influence(*pair) for pair in pairwise(hidden)], dtype=torch.float64)


def keep_best(scores: Sequence[Tensor], count: int) -> list[list[int]]:
    """List the `count` largest of each vector of scores as ascending numbers; among equals the smaller number stays.

    `ConfigError` when there are not as many, or none would stay.
    """
    most = min(len(s) for s in scores)
    if not 0 < count <= most:
        raise ConfigError(f"{count} of {most} cannot be kept; keep from 1 to {most}")
    return [sorted(s.sort(descending=True, stable=True).indices[:count].tolist()) for s in scores]


def keep_groups(scores: Sequence[Tensor], kv_heads: int, count: int) -> list[list[int]]:
    """List, of each layer's heads, those that read the `count` key/value heads with the largest sums of `scores`
    [heads].

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
