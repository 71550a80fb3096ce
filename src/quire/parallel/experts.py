"""Which rank holds which experts of a layer, and what is kept of how often each is used.
See docs/design/expert-parallel.md.

A layer's experts, and further copies of those most used, are divided so that every rank has as many matrices and, by
the counts there are, as much to do (EPLB, DeepSeek-AI 2024). Who computes an expert changes no bit of its output, and
outputs are summed in the order of a token's choices: a placement changes no bit of any result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from quire.core.errors import ConfigError
from quire.core.parallel import ParallelConfig

log = logging.getLogger(__name__)
Held = tuple[tuple[int, ...], ...]
"""By rank: the experts of a layer that it holds, ascending."""


class ExpertPlan(msgspec.Struct, frozen=True):
    """Over which axis experts are divided ("": they are not), with how many further copies a layer, by which counts.

    `counts`: by layer and expert, how many tokens chose it; none where nothing is known.
    """

    axis: str = ""
    redundant: int = 0
    counts: tuple[tuple[int, ...], ...] = ()


NOT_DIVIDED = ExpertPlan()


@dataclass(frozen=True)
class Division:
    """Place `rank` among the `world` ranks that divide the experts as `plan` says."""

    rank: int
    world: int
    plan: ExpertPlan

    @property
    def option(self) -> str:
        """What asks for it."""
        return "expert_parallel_size" if self.plan.axis == "expert" else "enable_expert_parallel"

    def held(self, layer: int, experts: int) -> Held:
        """Who holds which of the `experts` of `layer`. `ConfigError` when they cannot be divided so."""
        if self.world > experts:
            raise ConfigError(
                f"{experts} experts cannot be divided among {self.world} ranks; use at most as many ranks",
                param=self.option,
            )
        if self.plan.redundant > experts * (self.world - 1):
            raise ConfigError(
                f"--num-redundant-experts {self.plan.redundant}: {self.world} ranks with all {experts} experts have "
                f"{experts * (self.world - 1)} copies",
                param="num_redundant_experts",
            )
        counts = self.plan.counts[layer] if layer < len(self.plan.counts) else ()
        return place_experts(counts if len(counts) == experts else (0,) * experts, self.world, self.plan.redundant)


@cache
def place_experts(counts: tuple[int, ...], world: int, redundant: int) -> Held:
    """Experts by rank, `redundant` of them twice or more: as many on each rank, one more on the first where they must.

    A copy goes to the expert whose copies have most to do. Copies go to the ranks that hold least so far, of these to
    those with least to do; experts of one copy, most used first, to the rank with least to do that has room.
    """
    experts = len(counts)
    rooms = [(experts + redundant) // world + (rank < (experts + redundant) % world) for rank in range(world)]
    if not redundant and not any(counts):
        starts = [sum(rooms[:rank]) for rank in range(world)]
        return tuple(tuple(range(start, start + room)) for start, room in zip(starts, rooms, strict=True))
    copies = [1] * experts
    for _ in range(redundant):
        copies[max((e for e in range(experts) if copies[e] < world), key=lambda e: (counts[e] / copies[e], -e))] += 1
    held, loads = [set[int]() for _ in range(world)], [0.0] * world
    for e in sorted(range(experts), key=lambda e: (copies[e] == 1, -counts[e] / copies[e], e)):
        left = [rank for rank in range(world) if len(held[rank]) < rooms[rank]]
        if copies[e] > 1:
            left.sort(key=lambda rank: (len(held[rank]) - rooms[rank], loads[rank]))
        else:
            left.sort(key=lambda rank: loads[rank])
        for rank in left[: copies[e]]:
            held[rank].add(e)
            loads[rank] += counts[e] / copies[e]
    return tuple(tuple(sorted(each)) for each in held)


def expert_plan(parallel: ParallelConfig) -> ExpertPlan:
    """What the options ask for, with the counts that `--expert-load-file` holds, if it is there.

    `ConfigError` for a file that is none of ours.
    """
    counts: tuple[tuple[int, ...], ...] = ()
    if parallel.expert_load_file:
        counts = read_counts(Path(parallel.expert_load_file).expanduser())
    return ExpertPlan(parallel.expert_axis, parallel.num_redundant_experts, counts)


def read_counts(path: Path) -> tuple[tuple[int, ...], ...]:
    """Counts by layer and expert, none where there is no file; `ConfigError` for one that holds something else."""
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=tuple[tuple[int, ...], ...])
    except FileNotFoundError:
        log.info("%s is not there yet: experts are placed as if all were used alike", path)
        return ()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--expert-load-file {path}: {error}; remove it", param="expert_load_file") from None
    if any(count < 0 for row in counts for count in row):
        raise ConfigError(f"--expert-load-file {path}: a count is negative; remove it", param="expert_load_file")
    return counts


def write_counts(path: Path, counts: Sequence[Sequence[int]]) -> None:
    """Put `counts`, by layer and expert, in the place of what `path` holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(counts))
    fresh.replace(path)
