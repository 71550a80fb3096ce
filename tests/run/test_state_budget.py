"""How the memory of the cache is divided between blocks, states of sequences and snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.run.kv_budget import KVPlan, plan_kv, shape_kv

LENGTH, KIB = 4096, 1024


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of each token."""

    window: int = 0
    bytes_per_token: int = 2 * KIB


def planned(memory: int, state_bytes: int, **options: object) -> KVPlan:
    """The plan of `memory` bytes for one layer that attends and states of `state_bytes`."""
    config = flat_config(**({"kv_cache_memory_bytes": memory, "max_num_seqs": 4} | options))
    return plan_kv(config, shape_kv(config, {0: Kept()}, LENGTH, state_bytes=state_bytes))


def test_a_model_without_states_has_no_slots() -> None:
    assert planned(1 << 26, 0).states.slots == 0


@pytest.mark.parametrize("memory", [1 << 22, 1 << 26, 1 << 30])
def test_blocks_and_slots_fit_the_memory(memory: int) -> None:
    plan = planned(memory, 64 * KIB)
    assert plan.states.nbytes + plan.blocks * plan.block_bytes <= memory
    assert plan.states.slots >= 5, "one for each sequence that may run, and a spare one"


def test_snapshots_lie_as_far_apart_as_their_bytes_are_those_of_tokens() -> None:
    assert planned(1 << 26, 64 * KIB).states.interval == 32
    assert planned(1 << 26, 65 * KIB).states.interval == 48, "whole blocks"
    assert planned(1 << 26, 64 * KIB, state_interval=100).states.interval == 112


def test_small_states_have_no_more_snapshots_than_sequences_can_use() -> None:
    """A pool of a million slots takes a second and 200 MB of its own."""
    plan = planned(1 << 32, 4 * KIB)
    assert plan.states.slots == 5 * (2 + LENGTH // plan.states.interval)


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    plan = planned(1 << 30, 64 * KIB, enable_prefix_caching=False)
    assert (plan.states.slots, plan.states.interval) == (5, 0)


def test_slots_that_were_asked_for_are_taken_and_too_few_refused() -> None:
    assert planned(1 << 26, 64 * KIB, num_state_slots=9).states.slots == 9
    with pytest.raises(ConfigError, match="no room for 2 recurrent states"):
        planned(64 * KIB, 64 * KIB)
