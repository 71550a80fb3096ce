"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import prod

from quire.core.errors import ConfigError
from quire.core.parallel import ParallelConfig
from quire.model.load.roles import ROLES
from quire.model.spec import ModelSpec

Costs = tuple[list[float], float]
"""Of each layer, for a token of a prompt and one of an answer; of the head, which the last of a prompt alone needs."""


def stages_of(parallel: ParallelConfig, spec: ModelSpec, measured: Costs | None = None) -> tuple[range, ...]:
    """The layers of each stage: those asked for, or such that the busiest stage has least to do.

    `measured`: what was found of layers and head; by default numbers that a token reads, as these are what takes time.
    `ConfigError` where a model has too few layers, or its stages cannot be cut so.
    """
    count = parallel.pipeline_parallel_size
    if count == 1:
        return (range(spec.layers),)
    pinned = parallel.pinned_layers
    if pinned:
        return _asked(pinned, spec)
    layers, head = measured or costs(spec)
    found = cut(layers, ends_of(head, parallel), count, cuts(spec))
    if found is None:
        raise ConfigError(
            f"--pipeline-parallel-size {count}: {spec.layers} layers cannot be cut into so many stages"
            + (", as some read the keys and values of others" if spec.kv_source else ""),
            param="pipeline_parallel_size",
        )
    return found


def _asked(counts: tuple[int, ...], spec: ModelSpec) -> tuple[range, ...]:
    ends = list(accumulate(counts, initial=0))
    if ends[-1] != spec.layers:
        raise ConfigError(
            f"--pipeline-layers {','.join(map(str, counts))}: the model has {spec.layers} layers, not {ends[-1]}",
            param="pipeline_layers",
        )
    wrong = set(ends[1:-1]) - cuts(spec)
    if wrong:
        raise ConfigError(
            f"--pipeline-layers: layers from {min(wrong)} on read keys and values of a layer before it; cut elsewhere",
            param="pipeline_layers",
        )
    return tuple(range(*pair) for pair in pairwise(ends))


def cuts(spec: ModelSpec) -> set[int]:
    """Layers that a stage may begin with: neither they nor later ones read keys and values of earlier ones, and no
    layer of the files is cut."""
    firsts = filter(spec.begins, range(1, spec.layers))
    return {i for i in firsts if all(spec.kv_layer(j) >= i for j in range(i, spec.layers))}


def numbers_of(spec: ModelSpec, layer: int) -> float:
    """Weights of a layer that a token reads."""
    routing, total = spec.moe.routing, 0.0
    for role in ROLES.values():
        if role.layer and not role.encoder and not role.optional and role.where(spec, layer):
            total += prod(role.shape(spec.at(layer))) * (routing.top_k if role.experts else 1)
    return total


def costs(spec: ModelSpec) -> Costs:
    """Costs of layers and head: the numbers that a token of a prompt, and one of an answer, reads."""
    return [2 * numbers_of(spec, i) for i in range(spec.layers)], float(prod(ROLES["head"].shape(spec)))


def ends_of(head: float, parallel: ParallelConfig) -> tuple[float, float]:
    """What the first and the last stage have of the head's cost."""
    return (head / 2, head / 2) if parallel.tensor_parallel_size == 1 else (0.0, head)


def cut(layers: Sequence[float], ends: tuple[float, float], count: int, allowed: set[int]) -> tuple[range, ...] | None:
    """`count` ranges of `layers` such that the most that one costs is least; None where there are no such ranges.

    `ends`: what the first and the last cost beside. A stage begins with a layer that is `allowed`.
    """
    sums = [*accumulate(layers, initial=0.0)]

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[int, ...]] | None:
        """The first `stop` layers in so many stages: (the most, where each begins)."""
        own = ends[1] if stop == len(layers) else 0.0
        if stages == 1:
            return sums[stop] + ends[0], (0,)
        found = None
        for start in range(stages - 1, stop):
            before = best(start, stages - 1) if start in allowed else None
            if before is not None:
                most = max(before[0], sums[stop] - sums[start] + own)
                if found is None or most < found[0]:
                    found = most, (*before[1], start)
        return found

    if len(layers) < count or (chosen := best(len(layers), count)) is None:
        return None
    return tuple(range(*pair) for pair in pairwise((*chosen[1], len(layers))))
