"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from quire.core.errors import ConfigError
from quire.core.parallel import ParallelConfig
from quire.model.disk.opened import Opened
from quire.model.spec import ModelSpec

HEAD = 0.5
"""What a byte of the head takes beside one of a layer: every token made needs it, of a prompt the last one alone."""


def stages_of(parallel: ParallelConfig, opened: Opened) -> tuple[range, ...]:
    """The layers of each stage: those asked for, or such that the busiest stage has least to do.

    `ConfigError` where a model has too few layers, or its stages cannot be cut so.
    """
    spec, count = opened.spec, parallel.pipeline_parallel_size
    if count == 1:
        return (range(spec.layers),)
    if spec.encoder.layers:
        raise ConfigError(
            "--pipeline-parallel-size: an encoder's output is read by all layers of the decoder, and is computed by "
            "one rank only; leave it out",
            param="pipeline_parallel_size",
        )
    pinned = parallel.pinned_layers
    if pinned:
        return _asked(pinned, spec)
    layers, head = costs(opened)
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
    """Layers that a stage may begin with: neither they nor later ones read keys and values of earlier ones."""
    return {i for i in range(1, spec.layers) if all(spec.kv_layer(j) >= i for j in range(i, spec.layers))}


def costs(opened: Opened) -> tuple[list[float], float]:
    """(of each layer, of the head): bytes on disk that a token reads, as weights are what takes the time."""
    routing, layers, head = opened.spec.moe.routing, [0.0] * opened.spec.layers, 0.0
    for (role, place), parts in opened.claim.parts.items():
        size = float(sum(opened.source.infos[name].nbytes for name in parts.values()))
        if place.layer is not None:
            layers[place.layer] += size * (routing.top_k / routing.experts if role.startswith("expert_") else 1.0)
        elif role == "head" or (role == "embed" and not opened.claim.get("head")):
            head += size
    return layers, HEAD * head


def ends_of(head: float, parallel: ParallelConfig) -> tuple[float, float]:
    """What the first and the last stage have of the head's cost."""
    return (head / 2, head / 2) if parallel.tensor_parallel_size == 1 else (0.0, head)


def cut(
    layers: Sequence[float], ends: tuple[float, float], count: int, allowed: set[int]
) -> tuple[range, ...] | None:
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
