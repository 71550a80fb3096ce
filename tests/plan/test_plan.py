"""Plans: the account of memory beside what engines allocate, the figures of the literature, flows, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planned_models import LLAMA, LLAMA_7B, SMALL, native, rates, written
from quire.bench.drive import drive
from quire.bench.offline import Waste
from quire.bench.workload import Length, random_items, requests_of
from quire.core.config import flat_config
from quire.core.dtypes import BF16
from quire.core.errors import ConfigError
from quire.engine.local import LocalEngine
from quire.plan.devices import DEVICES
from quire.plan.latency import StepBounds, batch_flow, stream_flow
from quire.plan.memory import rank_needs
from quire.plan.planned_load import PlannedLoad, Slo, parse_load, parse_slo
from quire.plan.predict import Machine, Planner, devices_for, predict
from quire.plan.rates import (
    Attended,
    DatasheetRates,
    PlannedChunk,
    PlannedProduct,
    interpolated,
    keep,
    recall,
    stand_in,
)
from quire.plan.roofline import critical_batch
from quire.plan.sizing import cost_of, fitted, size
from quire.plan.weights import weight_bytes

LLAMA_70B = LLAMA | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672,
}  # fmt: skip
MIXTURE = SMALL | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
A100 = Machine(DEVICES["a100-40gb"])


def planner(folder: Path, config: dict[str, Any], machine: Machine = A100, **options: Any) -> Planner:
    return Planner(flat_config(model=written(folder, config), **options), machine)


def test_figures_of_a_model_of_7_b(tmp_path: Path) -> None:
    plan = planner(tmp_path, LLAMA_7B)
    assert plan.bare and plan.kv.block_bytes * plan.kv.sizes.footprint(4096) == 2 << 30
    assert plan.account.weights == pytest.approx(14e9, rel=0.04) and weight_bytes(7 * 10**9, 16) == 14 * 10**9
    assert plan.account.total <= DEVICES["a100-40gb"].memory * 0.9


@pytest.mark.parametrize(("form", "gigabytes", "devices"), [("none", 140, 4), ("int8", 70, 2), ("int4", 35, 1)])
def test_devices_of_a_model_of_70_b(form: str, gigabytes: int, devices: int, tmp_path: Path) -> None:
    config = flat_config(
        model=written(tmp_path, LLAMA_70B), quantization=form, group_size=128, tensor_parallel_size=4, max_num_seqs=8
    )
    plan = Planner(config, Machine(DEVICES["h200"]))
    found = size(plan, PlannedLoad(rate=0.01), Slo())
    whole = sum(rank.weights for rank in plan.ranks) * 4
    assert whole == pytest.approx(gigabytes * 1e9, rel=0.04)
    assert devices_for(round(whole * 0.999), DEVICES["a100-40gb"].memory) == devices
    assert found.weights_alone == 1 and found.replicas == 1 and found.ranks == 4


def test_ranks_are_found(tmp_path: Path) -> None:
    config = flat_config(model=written(tmp_path, LLAMA_70B), max_num_seqs=4)
    load = PlannedLoad(rate=0.1, input=512, output=64)
    found = size(fitted(config, A100, load), load, Slo())
    assert (found.weights_alone, found.ranks) == (4, 4)
    with pytest.raises(ConfigError, match="bytes are needed beside the KV cache"):
        Planner(config, A100)


def test_sharding_weights_saves_98_percent_at_64_ways(tmp_path: Path) -> None:
    options = {"data_parallel_size": 64, "fully_shard": True, "device": "cpu", "threads": 1}
    whole, shared = (
        planner(tmp_path, SMALL, Machine(None, rates()), kv_cache_memory_bytes=1 << 20, **given)
        for given in ({"device": "cpu"}, options)
    )
    layers = sum(part.nbytes for part in whole.ranks[0].parts if part.layers)
    saved = (whole.account.weights - shared.account.weights) / layers
    assert round(saved, 2) == 0.98


TIED = SMALL | {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 509}
"""With a vocabulary that is not a whole number of what kernels take at a time."""
FORMATS: list[dict[str, Any]] = [
    {}, {"quantization": "int8"}, {"quantization": "int4", "group_size": 64}, {"quantization": "nf4"},
    {"quantization": "mxfp4"}, {"dtype": "float32"}, {"bf16_bits": 12}, {"enable_lora": True, "max_loras": 2},
    {"kv_cache_dtype": "int8", "block_size": 32, "max_model_len": 256},
]  # fmt: skip


@pytest.mark.sampled(4)
@native
@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("model", [SMALL, TIED, MIXTURE], ids=["separate", "tied", "mixture"])
def test_engines_allocate_what_is_planned(model: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("enable_lora") and model is MIXTURE:
        pytest.skip("room for adapters of attention alone is counted, as of any")
    given = {"model": written(tmp_path, model), "load_format": "dummy", "device": "cpu", "cache_packed": "off",
             "kv_cache_memory_bytes": 1 << 20, "lora_extra_bytes": 0} | options  # fmt: skip
    plan = Planner(flat_config(**given), Machine())
    engine = LocalEngine(flat_config(**given))
    assert plan.account.weights == engine.info.weight_bytes
    tensors = [t for cache in engine.engine.runner.caches.own for t in (cache.keys, cache.values)]
    assert plan.account.kv == sum(t.nbytes for t in tensors)
    assert (plan.kv.blocks, plan.kv.max_model_len) == (engine.info.num_blocks, engine.info.max_model_len)
    cpu = engine.engine.ops.cpu
    assert cpu is not None
    before = [area.size for area in cpu.arena._areas]
    items = random_items(6, Length(150, 150), Length(4, 4), vocab_size=engine.info.vocab_size, seed=1)
    drive(engine, requests_of(items, engine.info, "largest"))
    assert [area.size for area in cpu.arena._areas] == before, "no step outgrew what was reserved"


@native
def test_contiguous_reservation_wastes_what_is_said(tmp_path: Path) -> None:
    engine = LocalEngine(
        flat_config(model=written(tmp_path, SMALL), load_format="dummy", device="cpu", num_blocks=512, block_size=4)
    )
    items = random_items(12, Length(60, 240), Length(8, 24), vocab_size=512, seed=3)
    waste = Waste(engine)
    drive(engine, requests_of(items, engine.info, "waste"), waste)
    found = waste.summary()
    assert 0.6 <= found["contiguous_max_model_len"]["mean"] <= 0.8
    assert found["paged"]["mean"] < 0.04


@dataclass
class Steps:
    """Each step takes `fixed` and `row` for every row."""

    fixed: float = 0.01
    row: float = 0.001

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        return self.fixed + self.row * sum(chunk.rows for chunk in chunks) if chunks else 0.0


def test_a_batch_flows_as_the_scheduler_plans() -> None:
    flow = batch_flow(Steps(), PlannedLoad(batch=2, input=100, output=11), StepBounds(8, 100))
    first, mixed, last = 0.11, 0.01 + 0.001 * 100, 0.01 + 0.001 * 2  # prompt; a decode and 99 tokens; then the last one
    assert flow.ttft == pytest.approx((first + first + mixed + last) / 2)
    assert flow.tpot > last and flow.requests_per_s == pytest.approx(flow.concurrency / flow.e2e)
    narrow = batch_flow(Steps(), PlannedLoad(batch=2, input=100, output=11), StepBounds(1, 100))
    assert narrow.ttft > flow.ttft and narrow.concurrency == pytest.approx(1.5, rel=0.01)  # one waits while one runs


def test_a_stream_keeps_littles_law_and_has_an_end() -> None:
    load = PlannedLoad(rate=0.5, input=100, output=20)
    quiet = stream_flow(Steps(), load, StepBounds(32, 128))
    assert quiet.stable and quiet.concurrency == pytest.approx(0.5 * quiet.e2e) and quiet.capacity > 2
    busy = stream_flow(Steps(), msgspec.structs.replace(load, rate=quiet.capacity * 0.8), StepBounds(32, 128))
    assert busy.stable and busy.ttft > quiet.ttft and busy.tpot > quiet.tpot
    over = stream_flow(Steps(), msgspec.structs.replace(load, rate=quiet.capacity * 2), StepBounds(32, 128))
    assert not over.stable and over.capacity == pytest.approx(quiet.capacity, rel=0.02)
    assert over.requests_per_s == over.capacity


def test_attention_counts_pairs_within_the_window() -> None:
    whole, window = Attended(4, 2, 64, 512), Attended(4, 2, 64, 512, window=8)
    for chunk in (PlannedChunk(1, 0), PlannedChunk(5, 0), PlannedChunk(5, 6), PlannedChunk(3, 100)):
        seen = [min(8, chunk.context + i + 1) for i in range(chunk.rows)]
        assert window.pairs([chunk]) == sum(seen)
        assert whole.pairs([chunk]) == sum(chunk.context + i + 1 for i in range(chunk.rows))


def test_rooflines(tmp_path: Path) -> None:
    sheet, device = DatasheetRates(DEVICES["h100"]), DEVICES["h100"]
    small = PlannedProduct("bf16", 1e9, 2e9, 1, 1, False, 2e9)
    assert sheet.product(small) == pytest.approx(2e9 / (0.8 * device.bandwidth))
    assert sheet.product(small._replace(rows=4096)) == pytest.approx(2e9 * 4096 / (0.6 * device.flops[16]))
    assert interpolated([1, 4], [1.0, 16.0], 2) == pytest.approx(4) and interpolated([1, 4], [1.0, 16.0], 8) == 32
    plan = planner(tmp_path, SMALL, Machine(None, rates()), device="cpu")
    assert 8 <= critical_batch(plan.times) < 256
    decode = [plan.times.seconds([PlannedChunk(1, context)]) for context in (1, 100, 400)]
    assert decode == sorted(decode) and plan.times.seconds([]) == 0
    assert stand_in("super4 g32", {"bf16": rates().kinds["bf16"]}) == "bf16"


def test_ranks_have_their_share(tmp_path: Path) -> None:
    alone = planner(tmp_path, LLAMA_7B)
    for name, ranks in (("tensor_parallel_size", 4), ("pipeline_parallel_size", 4)):
        plan = planner(tmp_path, LLAMA_7B, **{name: ranks})
        assert plan.account.weights < alone.account.weights / 3
        assert plan.times.seconds([PlannedChunk(512, 0)]) > 0
        assert sum(rank.weights for rank in plan.ranks) * (4 if len(plan.ranks) == 1 else 1) == pytest.approx(
            alone.account.weights, rel=0.02
        )
    mixed = planner(tmp_path / "experts", MIXTURE, expert_parallel_size=4)
    [one] = rank_needs(mixed.config, mixed.facts, mixed.choice)
    assert next(part for part in one.parts if part.role == "expert_down").copies == 3 * 2
    assert mixed.predict(PlannedLoad(input=64, output=16)).tpot_ms > 0


def test_least_squares_find_what_made_the_times() -> None:
    calibrate = pytest.importorskip("quire.plan.calibrate")
    features = np.random.default_rng(0).uniform(0.1, 1, (12, 3))
    found = calibrate.non_negative(features, features @ np.array([2.0, 0.0, 0.5]))
    assert found == pytest.approx([2.0, 0.0, 0.5], abs=1e-9)
    assert min(calibrate.non_negative(features, features @ np.array([2.0, -0.4, 0.5]))) == 0


@native
def test_parts_of_a_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.core.config import DeviceConfig
    from quire.ops.backend import open_backend
    from quire.plan import calibrate

    monkeypatch.setattr(calibrate, "ATTENDED", ((1, 31, 1), (4, 31, 1), (1, 0, 32), (2, 32, 16)))
    ops = open_backend(DeviceConfig(device="cpu"))
    before = ops.tuning
    found = calibrate.attention_rates(ops, BF16, seconds=0.0)
    assert all(value >= 0 for value in msgspec.structs.astuple(found)) and any(msgspec.structs.astuple(found))
    assert calibrate.sample_seconds(ops) > 0 and calibrate.call_seconds(ops) > 0
    assert before == ops.tuning


def test_a_calibration_is_kept(tmp_path: Path) -> None:
    assert recall("made up", tmp_path) is None
    keep(rates(), tmp_path)
    keep(msgspec.structs.replace(rates(), machine="other"), tmp_path)
    assert recall("made up", tmp_path) == rates() and recall("other", tmp_path) is not None
    (tmp_path / "planner.json").write_text("{")
    assert recall("made up", tmp_path) is None


def test_loads_are_read() -> None:
    assert parse_load("rate=2,input=512,output=128") == PlannedLoad(rate=2.0)
    assert parse_load(" batch=8 , input=7").batch == 8 and parse_slo("itl=50") == Slo(itl=50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not one of"), ("batch", "is not one of"), ("batch=x", "'x' is no number"), ("batch=1.5", "--load"),
        ("batch=1,batch=2", "each once"), ("rate=1,batch=2", "give one"), ("rate=0", "above 0"), ("rate=nan", "--load"),
        ("batch=0", "must lie in"), ("input=1,shared=1", "at least one"), ("output=99999999999", "must lie in"),
    ],
)  # fmt: skip
def test_loads_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_load(text)


def test_cost_is_that_of_the_offered_load() -> None:
    cost = cost_of(2, 3.0, 0.5, 100)
    assert cost.hour == 6 and cost.request == pytest.approx(6 / 1800) and cost.million_tokens == pytest.approx(100 / 3)
    with pytest.raises(ConfigError, match="--price"):
        cost_of(1, float("nan"), 1, 1)


def test_predictions_take_milliseconds(tmp_path: Path) -> None:
    config = flat_config(model=written(tmp_path, LLAMA_7B))
    found = predict(config, PlannedLoad(batch=16), A100)
    assert (
        found == predict(config, PlannedLoad(batch=16), A100) and found.meets(Slo()) and not found.meets(Slo(itl=0.001))
    )
    assert found.memory["total"] == sum(v for k, v in found.memory.items() if k != "total")
