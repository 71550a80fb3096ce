"""Plans of models with recurrent states: their bytes are those of engines, and steps read and write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", reason="it writes the models")

from oracle import write
from planned_models import native, rates
from quire.bench.suite.measures import mixer_flops
from quire.cli.app import app
from quire.core.config import flat_config
from quire.engine.local import LocalEngine
from quire.model.mixers.attention import Attention
from quire.model.mixers.layer_mixers import mixer_of
from quire.ops.backend import open_backend
from quire.plan.calibrate import recurrence_rates
from quire.plan.devices import BANDWIDTH, DEVICES
from quire.plan.predict import Machine, Planner
from quire.plan.rates import STATE_FLOPS, DatasheetRates, PlannedChunk
from speculation_methods import TINY, write_words

STATE = 4 * 4 * 16 * 8
"""Bytes of one of two layers: four heads of 16 x 8 numbers."""
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 1 << 22, "max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("states")
    family, facts = TINY["states"]
    write(path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    return str(write_words(path, 99))


def planner(folder: str, **options: Any) -> Planner:
    return Planner(flat_config(model=folder, **OPTIONS | options), Machine(None, rates()))


@native
@pytest.mark.parametrize(
    "options", [{}, {"num_state_slots": 11}, {"enable_prefix_caching": False}, {"block_size": 1}], ids=str
)
def test_engines_take_what_is_planned(folder: str, options: dict[str, Any]) -> None:
    plan, engine = planner(folder, **options), LocalEngine(flat_config(model=folder, **OPTIONS | options))
    caches, kv = engine.engine.runner.caches, engine.engine.kv
    assert plan.kv.states == kv.states and kv.states.slot_bytes == 2 * STATE
    taken = sum(t.nbytes for cache in caches.own for t in (cache.keys, cache.values))
    assert plan.account.kv == taken + sum(array.nbytes for array in caches.states)
    assert plan.kv.blocks == kv.blocks


@native
def test_ranks_that_share_heads_have_their_part_of_a_state(folder: str) -> None:
    assert planner(folder, tensor_parallel_size=2).kv.states.slot_bytes == STATE


@native
def test_a_sequence_needs_a_slot(folder: str) -> None:
    assert planner(folder, num_state_slots=5).sequences(16) == 4


@native
def test_each_step_reads_and_writes_the_states_of_its_sequences(folder: str) -> None:
    with_states = planner(folder)
    found = rates()
    numbers, per_state, per_row = STATE // 4, found.recurrence.state, found.recurrence.row
    for rows, seqs in ((1, 1), (1, 8), (40, 2)):
        chunks = [PlannedChunk(rows, 10)] * seqs
        step = with_states.times.seconds(chunks)
        stage = with_states.times._stages[0]
        kept, stage._states = stage._states, type(stage._states)()
        without = with_states.times.seconds(chunks)
        stage._states = kept
        assert step - without == pytest.approx(2 * numbers * (per_state * seqs + per_row * rows * seqs))


def test_a_device_moves_states_at_its_bandwidth_and_computes_rows() -> None:
    device = DEVICES["a100-40gb"]
    asked, numbers = DatasheetRates(device), 32 * 128 * 128
    decodes = asked.recurrence(numbers, [PlannedChunk(1, 100)] * 16, 24)
    assert decodes == pytest.approx(24 * 16 * 2 * 4 * numbers / (BANDWIDTH * device.bandwidth))
    assert asked.recurrence(numbers, [PlannedChunk(4096, 0)], 1) > asked.recurrence(numbers, [PlannedChunk(1, 0)], 1)


@native
def test_the_recurrence_is_measured() -> None:
    found = recurrence_rates(open_backend(flat_config(device="cpu", threads=1).device), 0.005, 16 << 20)
    assert found.row > 0 and found.call >= 0 and found.state >= 0


@native
def test_what_states_take_is_shown(folder: str) -> None:
    shown = CliRunner().invoke(app, ["inspect", folder, "--max-model-len", "256"])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert "states 2 layers" in words
    assert "recurrent states 4.0 KiB a sequence, read and written in every step" in words
    assert "a snapshot every" in words


def test_a_layer_with_a_state_multiplies_as_much_at_any_length(folder: str) -> None:
    spec = planner(folder).facts.spec
    attention = sum(isinstance(mixer_of(spec, layer), Attention) for layer in range(spec.layers))
    growth = mixer_flops(spec, 200) - mixer_flops(spec, 100)
    assert 0 < attention < spec.layers
    assert growth == 100 * 4 * attention * spec.heads * spec.head_dim
    assert mixer_flops(spec, 0) == 2 * STATE / 4 * STATE_FLOPS
