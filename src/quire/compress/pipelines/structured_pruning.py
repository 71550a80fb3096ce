"""Structured pruning as a stage: which heads, MLP channels and layers go, and the smaller folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.calibration.hidden_states import HiddenStates
from quire.compress.checkpoint.dequantized import draft_tensors
from quire.compress.checkpoint.linear_weights import linear_weights
from quire.compress.checkpoint.net import Net, checkpoint_dtype
from quire.compress.pipelines.layerwise import LayerModifier, observe_inputs, per_matrix
from quire.compress.pipelines.stage_io import StageContext, write_stage_output
from quire.compress.prune.scores import (
    block_influence,
    channel_scores,
    head_scores,
    keep_best,
    keep_groups,
    magnitude,
    taylor,
    wanda,
)
from quire.compress.prune.structured import check_heads, drop_channels, drop_heads, drop_layers
from quire.compress.recipes.stages import Structured
from quire.core.errors import ConfigError
from quire.model.spec import ModelSpec
from quire.ops.weights import Weight

OBSERVE_NORMS = LayerModifier(per_matrix(lambda w, observed: Weight("f32", w)), ("norms",), sequential=False)
"""A modifier that observes norms, and changes nothing."""
TokenRows = Sequence[Sequence[int]]
ElementScores = dict[str, Tensor]
"""A score of each number of the tensors on disk."""
CHANNEL_MULTIPLE = 32
"""Multiple of which the number of channels is: what formats with groups of columns need."""


def run_structured(context: StageContext, stage: Structured) -> None:
    """Write the model without the parts that score least."""
    net = Net.open(context.model)
    for layer in range(net.spec.layers):
        for matrix in linear_weights(net, layer):
            matrix.check(net)
    drafts = set(draft_tensors(net.opened, net.tensors))
    spec, config = net.spec, dict(net.config)
    tensors = {name: tensor for name, tensor in net.tensors.items() if name not in drafts}
    check_structured(spec, stage)
    rows = context.rows().tokens
    elements = ELEMENT_SCORES[stage.score](net, rows, context.spill) if stage.score in ELEMENT_SCORES else {}
    elements = {name: scores for name, scores in elements.items() if name in tensors}
    if stage.channels:
        width = max(1, round(spec.intermediate * (1 - stage.channels) / CHANNEL_MULTIPLE)) * CHANNEL_MULTIPLE
        kept = keep_best(channel_scores(elements, net.config), min(width, spec.intermediate))
        tensors, config = drop_channels(tensors, config, kept)
    if stage.heads:
        kept = keep_groups(head_scores(elements, net.config), spec.kv_heads, groups_left(spec, stage))
        tensors, config = drop_heads(tensors, config, kept)
    if stage.layers:
        scores = layer_influences(net, rows, context.spill) if not elements else layer_sums(net, elements)
        tensors, config = drop_layers(tensors, config, keep_best([scores], spec.layers - stage.layers)[0])
    write_stage_output(context, net, tensors, config, checkpoint_dtype(net))
    for _ in range(spec.layers):
        context.report("writing")


def check_structured(spec: ModelSpec, stage: Structured) -> None:
    """Refuse a stage before any work: `ConfigError` or `ModelError` where no checkpoint of the family can be what it
    leaves."""
    if stage.heads:
        check_heads(spec, groups_left(spec, stage) * (spec.heads // spec.kv_heads))
    if stage.layers >= spec.layers:
        raise ConfigError(f"layers = {stage.layers}: the model has {spec.layers}, and one must stay")


def groups_left(spec: ModelSpec, stage: Structured) -> int:
    """Count the key/value heads that stay, each with its query heads."""
    return max(1, round(spec.kv_heads * (1 - stage.heads)))


def magnitude_scores(net: Net, rows: TokenRows, spill: Path | None) -> ElementScores:
    """Score every number by |w|."""
    return {name: magnitude(tensor) for name, tensor in net.tensors.items()}


def activation_scores(net: Net, rows: TokenRows, spill: Path | None) -> ElementScores:
    """Score the matrices of layers by |w| ||x||, and by nothing what has no inputs."""
    states, found = HiddenStates(net, rows, spill), ElementScores()
    for layer in range(net.spec.layers):
        own = linear_weights(net, layer)
        observed = observe_inputs(net, layer, own, OBSERVE_NORMS, states)
        for matrix in own:
            matrix.assign(net, wanda(matrix.read(net), observed[matrix.input_role, matrix.place.expert].inputs.norms))
        for matrix in own:
            name = net.rewritten.origins[matrix.name]
            found[name] = net.tensors[name]
        for matrix in own:
            matrix.restore(net)
        states.advance(net.layer(layer))
    return {name: found.get(name, torch.zeros(net.tensors.shape(name))) for name in net.tensors}


def gradient_scores(net: Net, rows: TokenRows, spill: Path | None) -> ElementScores:
    """Score every number by |w dL/dw|, L the mean loss of the text, a row after the other."""
    leaves = net.require_grad(True)
    for row in rows:
        tokens = torch.tensor(row)[None]
        (net.loss(tokens[:, :-1], tokens[:, 1:]) / len(rows)).backward()  # type: ignore[no-untyped-call]
    found = {name: taylor(leaf.detach(), leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: found.get(name, torch.zeros(net.tensors.shape(name))) for name in net.tensors}


def layer_influences(net: Net, rows: TokenRows, spill: Path | None) -> Tensor:
    """Measure how much each layer turns the hidden states, [layers] f64 (ShortGPT)."""
    states, found, turned = HiddenStates(net, rows, spill), list[float](), list[float]()

    def see(before: Tensor, after: Tensor) -> None:
        turned.append(len(before) * block_influence(before.flatten(0, 1), after.flatten(0, 1)))

    for layer in range(net.spec.layers):
        turned.clear()
        states.advance(net.layer(layer), see)
        found.append(sum(turned) / len(rows))
    return torch.tensor(found, dtype=torch.float64)


def layer_sums(net: Net, elements: ElementScores) -> Tensor:
    """Sum the scores of each layer, [layers] f64."""
    found = torch.zeros(net.spec.layers, dtype=torch.float64)
    for (_, place), parts in net.opened.claim.parts.items():
        if place.layer is not None:
            for name in parts.values():
                origin = net.rewritten.origins[name]
                found[place.layer] += net.rewritten.part(name, elements[origin]).double().sum()
    return found


ELEMENT_SCORES: dict[str, Callable[[Net, TokenRows, Path | None], ElementScores]] = {
    "magnitude": magnitude_scores,
    "activation": activation_scores,
    "gradient": gradient_scores,
}
"""Scores of single numbers by name; hidden states of the text lie in the folder `spill` where there is one."""
