"""The stage that takes heads, MLP channels and layers out of a model: which ones, and the smaller folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.changed import own_dtype, write
from quire.compress.context import Context
from quire.compress.layerwise import Change, each, observed
from quire.compress.matrices import matrices
from quire.compress.net import Net
from quire.compress.prune.importance import channel_scores, head_scores, keep_best, keep_groups
from quire.compress.prune.scores import block_influence, magnitude, taylor, wanda
from quire.compress.prune.structured import check_heads, drop_channels, drop_heads, drop_layers
from quire.compress.stages import Structured
from quire.compress.walk import Stream
from quire.core.errors import ConfigError
from quire.model.spec import ModelSpec
from quire.ops.weights import Weight

LOOK = Change(each(lambda w, seen: Weight("f32", w)), ("norms",), in_turn=False)
"""Sees norms, and changes nothing."""
Rows = Sequence[Sequence[int]]
Elements = dict[str, Tensor]
"""A score of each number of the tensors on disk."""
STEP = 32
"""Channels stay in whole steps of so many: what formats with groups of columns need."""


def take_out(context: Context, stage: Structured) -> None:
    """Write the model without the parts that score least."""
    net = Net.open(context.model)
    for layer in range(net.spec.layers):
        for matrix in matrices(net, layer):
            matrix.check(net)
    spec, tensors, config = net.spec, dict(net.tensors), dict(net.config)
    check_parts(spec, stage)
    rows = context.rows().tokens
    elements = SCORES[stage.score](net, rows, context.spill) if stage.score in SCORES else {}
    if stage.channels:
        width = max(1, round(spec.intermediate * (1 - stage.channels) / STEP)) * STEP
        kept = keep_best(channel_scores(elements, net.config), min(width, spec.intermediate))
        tensors, config = drop_channels(tensors, config, kept)
    if stage.heads:
        kept = keep_groups(head_scores(elements, net.config), spec.kv_heads, groups_left(spec, stage))
        tensors, config = drop_heads(tensors, config, kept)
    if stage.layers:
        scores = influences(net, rows, context.spill) if not elements else layer_sums(net, elements)
        tensors, config = drop_layers(tensors, config, keep_best([scores], spec.layers - stage.layers)[0])
    write(context, net, tensors, config, own_dtype(net))
    for _ in range(spec.layers):
        context.tell("writing")


def check_parts(spec: ModelSpec, stage: Structured) -> None:
    """Before any work: `ConfigError` or `ModelError` where no checkpoint of the family can be what the stage leaves."""
    if stage.heads:
        check_heads(spec, groups_left(spec, stage) * (spec.heads // spec.kv_heads))
    if stage.layers >= spec.layers:
        raise ConfigError(f"layers = {stage.layers}: the model has {spec.layers}, and one must stay")


def groups_left(spec: ModelSpec, stage: Structured) -> int:
    """Key/value heads that stay, each with its query heads."""
    return max(1, round(spec.kv_heads * (1 - stage.heads)))


def by_magnitude(net: Net, rows: Rows, spill: Path | None) -> Elements:
    """|w| of everything."""
    return {name: magnitude(tensor) for name, tensor in net.tensors.items()}


def by_activation(net: Net, rows: Rows, spill: Path | None) -> Elements:
    """|w| ||x|| of the matrices of layers; nothing of what has no inputs."""
    stream, found = Stream(net, rows, spill), Elements()
    for layer in range(net.spec.layers):
        own = matrices(net, layer)
        seen = observed(net, layer, own, LOOK, stream)
        for matrix in own:
            matrix.put(net, wanda(matrix.of(net), seen[matrix.observed, matrix.place.expert].inputs.norms))
        for matrix in own:
            name = net.rewritten.origins[matrix.name]
            found[name] = net.tensors[name]
        for matrix in own:
            matrix.forget(net)
        stream.advance(net.layer(layer))
    return {name: found.get(name, torch.zeros(net.tensors.shape(name))) for name in net.tensors}


def by_gradient(net: Net, rows: Rows, spill: Path | None) -> Elements:
    """|w dL/dw| of everything, L the mean loss of the text, a row after the other."""
    leaves = net.require_grad(True)
    for row in rows:
        tokens = torch.tensor(row)[None]
        (net.loss(tokens[:, :-1], tokens[:, 1:]) / len(rows)).backward()  # type: ignore[no-untyped-call]
    found = {name: taylor(leaf.detach(), leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: found.get(name, torch.zeros(net.tensors.shape(name))) for name in net.tensors}


def influences(net: Net, rows: Rows, spill: Path | None) -> Tensor:
    """How much each layer turns the stream, [layers] f64 (ShortGPT)."""
    stream, found, turned = Stream(net, rows, spill), list[float](), list[float]()

    def see(before: Tensor, after: Tensor) -> None:
        turned.append(len(before) * block_influence(before.flatten(0, 1), after.flatten(0, 1)))

    for layer in range(net.spec.layers):
        turned.clear()
        stream.advance(net.layer(layer), see)
        found.append(sum(turned) / len(rows))
    return torch.tensor(found, dtype=torch.float64)


def layer_sums(net: Net, elements: Elements) -> Tensor:
    """The sum of scores of each layer, [layers] f64."""
    found = torch.zeros(net.spec.layers, dtype=torch.float64)
    for (_, place), parts in net.opened.claim.parts.items():
        if place.layer is not None:
            for name in parts.values():
                origin = net.rewritten.origins[name]
                found[place.layer] += net.rewritten.part(name, elements[origin]).double().sum()
    return found


SCORES: dict[str, Callable[[Net, Rows, Path | None], Elements]] = {
    "magnitude": by_magnitude,
    "activation": by_activation,
    "gradient": by_gradient,
}
"""Scores of single numbers by name; the stream of text lies in the folder `spill` where there is one."""
