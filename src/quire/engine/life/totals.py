"""How statistics add: over the replicas of a model, and over the engines that had one place after each other.

`RULES` and `STORE` are the whole of it: a field of `Stats` or `StoreStats` without a rule cannot be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from quire.engine.client import Stats, StoreStats

Add = Callable[[Sequence[Any]], Any]


class Rule(NamedTuple):
    """`replicas`: of engines side by side; `lives`: of one engine after the other, the latest last."""

    replicas: Add
    lives: Add


def latest(values: Sequence[Any]) -> Any:
    """What is now: of a gauge, which an engine that is gone no longer has."""
    return values[-1]


def mean(values: Sequence[float]) -> float:
    """Of shares."""
    return sum(values) / len(values)


def by_place(values: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Of counts by place, of which some have more places than others."""
    return tuple(map(sum, zip_longest(*values, fillvalue=0)))


def joined(values: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Of figures by rank: the ranks of the first replica, then those of the next."""
    return tuple(chain(*values))


def names(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Of sets of names."""
    return tuple(sorted(set(chain(*values))))


GAUGE, COUNTER = Rule(sum, latest), Rule(sum, sum)
RULES = {
    **dict.fromkeys(("running", "waiting", "used_blocks", "total_blocks", "cached_blocks", "step_tokens"), GAUGE),
    "restarts": GAUGE,  # whoever starts engines counts them
    "waste": Rule(mean, latest),
    "step_seconds": Rule(max, latest),
    **dict.fromkeys(
        (
            "steps", "prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits",
            "picture_queries", "picture_hits", "numeric_errors", "drafts", "draft_tokens", "accepted_tokens",
        ),
        COUNTER,
    ),
    "accepted_per_pos": Rule(by_place, by_place),
    "expert_pairs": Rule(joined, by_place),
    "running_adapters": Rule(names, latest),
    "waiting_adapters": Rule(names, latest),
    "bubbles": Rule(joined, latest),
}  # fmt: skip
"""Fields of `Stats`. Of the others, `expert_imbalance` is a mean by pairs, `kv_store` has rules of its own, and
`replicas` is made where replicas are added."""
STORE = {
    **dict.fromkeys(("blocks", "bytes"), Rule(max, latest)),  # all have one folder, which outlives them
    **dict.fromkeys(("written", "hits", "misses", "bad", "dropped"), COUNTER),
}
"""Fields of `StoreStats`."""
STAYS = ("total_blocks", "restarts")
"""Gauges of an engine that is gone which the next one has too."""


def total(stats: Sequence[Stats]) -> Stats:
    """The statistics of engines side by side."""
    return _added(stats, 0)


def over_lives(before: Stats, now: Stats) -> Stats:
    """The statistics of an engine and of those before it, as `ended` left them."""
    return _added((before, now), 1)


def ended(stats: Stats) -> Stats:
    """What is left of an engine that is gone: totals, and no gauges."""
    kept = {name: getattr(stats, name) for name, rule in RULES.items() if rule.lives is not latest or name in STAYS}
    return Stats(kv_store=stats.kv_store, expert_imbalance=stats.expert_imbalance, **kept)


def _added(stats: Sequence[Stats], which: int) -> Stats:
    found = {name: rule[which]([getattr(each, name) for each in stats]) for name, rule in RULES.items()}
    stores = [each.kv_store for each in stats if each.kv_store is not None]
    store = {name: rule[which]([getattr(each, name) for each in stores]) for name, rule in STORE.items() if stores}
    return Stats(
        expert_imbalance=_imbalance(stats), kv_store=StoreStats(**store) if stores else None, replicas=(), **found
    )


def _imbalance(stats: Sequence[Stats]) -> float:
    """Pairs of the ranks that had most over the mean, of all pairs."""
    pairs = [sum(each.expert_pairs) for each in stats]
    if not any(pairs):
        return 1.0
    return sum(each.expert_imbalance * own for each, own in zip(stats, pairs, strict=True)) / sum(pairs)
