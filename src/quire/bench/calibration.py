"""The calibration of this machine for plans: recalled from the cache folder, or what lacks of it measured now."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from quire.bench.workload import Item, requests_of
from quire.core.config import DeviceConfig, EngineConfig, flat_config
from quire.core.errors import ConfigError
from quire.engine.local import LocalEngine
from quire.figures.machine import now
from quire.ops.backend import Ops, select
from quire.ops.choice import Choice, choose
from quire.ops.lazy import torch_dtype
from quire.ops.measure import READ_BYTES, read_rate
from quire.plan.devices import Device
from quire.plan.memory import KEPT, PROCESS, choice_of, facts_of, kv_format, rank_needs
from quire.plan.predict import Machine
from quire.plan.rates import Calibration, far_bytes, keep, machine_key, recall

MICRO = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 320, "head_dim": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A model whose steps are nothing but what surrounds a decoder."""
BATCHES = (1, 8, 32)
STEPS = 40
PROMPT, LAYERS = 128, 9


def machine_of(
    config: EngineConfig, device: Device | None, fresh: bool = False, beside: tuple[str, ...] = ()
) -> Machine:
    """Where `config` is to run: a named GPU, or this machine, calibrated for what the config needs, and for the formats
    `beside`, which advice compares.

    The first time takes some 10 s and a format, a minute where the largest cache is hundreds of MiB; `fresh` measures
    again. `ConfigError` where nothing can be calibrated.
    """
    if device is not None:
        return Machine(device)
    found, _ = facts_of(config)
    choice = choice_of(config, None)
    if choice.backend != "cpu":
        raise ConfigError(
            f"--device this: step times are calibrated for the CPU's kernels, and {choice.backend} runs here; name the "
            "GPU, or ask for --device cpu",
            param="device",
        )
    kinds = {part.kind for rank in rank_needs(config, found, choice) for part in rank.parts if part.product}
    kinds |= {kind if kind == "bf16" else f"{kind} g{config.model.group_size}" for kind in beside}
    return Machine(None, calibration(config.device, kinds, kv_format(config, found, choice).name, fresh))


def calibration(device: DeviceConfig, kinds: Collection[str], kv: str, fresh: bool = False) -> Calibration:
    """Of this machine, with rates of at least `kinds` and of attention over keys and values in `kv`."""
    from quire.plan import calibrate

    choice = choose(device)
    key = machine_key(choice.isa, choice.threads)
    found = None if fresh else recall(key)
    wanted = {kind for kind in kinds if measurable(kind)} or {"bf16"}
    lacking = wanted if found is None else wanted - set(found.kinds)
    if found is not None and not lacking and kv in found.attention:
        return found
    ops = select(device)
    if found is None:
        found = _basics(ops, choice, key, device)
    kinds_now = {kind: calibrate.kind_rates(ops, kind, far=far_bytes()) for kind in sorted(lacking)}
    attention = found.attention
    if kv not in attention:
        attention = attention | {kv: calibrate.attention_rates(ops, torch_dtype(KEPT[kv]), far=far_bytes())}
    found = replace(found, kinds=found.kinds | kinds_now, attention=attention, measured=now())
    keep(found)
    return found


def measurable(kind: str) -> bool:
    """Whether matrices of the kind can be made up: others count as one of as many bits."""
    return kind in ("bf16", "bf12", "f32") or re.fullmatch(r"(int8|int4|table4) g(32|64|128)", kind) is not None


def _basics(ops: Ops, choice: Choice, key: str, device: DeviceConfig) -> Calibration:
    from quire.ops.arena import huge_bytes
    from quire.plan import calibrate

    assert ops.cpu is not None
    data = huge_bytes(ops.cpu.native, READ_BYTES).zero_()
    return Calibration(
        machine=key,
        read_bytes_per_s=read_rate(ops.cpu, data),
        call=calibrate.call_seconds(ops),
        kinds={},
        attention={},
        norms=calibrate.norm_seconds(ops),
        ropes=calibrate.rope_seconds(ops),
        sample=calibrate.sample_seconds(ops),
        host=host_seconds(device),
        process=PROCESS,
    )


def host_seconds(device: DeviceConfig) -> tuple[float, float, float, float]:
    """Of a step, of a sequence in it, of a row of it, of a layer whose ops are called: engines of one and of `LAYERS`
    layers that compute next to nothing.
    """
    decodes, one = _host(device, 1)
    _, several = _host(device, LAYERS)
    of_seq, step = np.polyfit(BATCHES, decodes, 1)
    of_layer = max(0.0, (several - one) / (LAYERS - 1))
    of_row = max(0.0, (one - of_layer - decodes[0]) / PROMPT)
    return max(0.0, float(step)), max(0.0, float(of_seq)), of_row, of_layer


def _host(device: DeviceConfig, layers: int) -> tuple[list[float], float]:
    """Seconds of decodes of `BATCHES`, and of a prompt's step."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MICRO | {"num_hidden_layers": layers}))
        config = replace(flat_config(model=folder, load_format="dummy", num_blocks=4096), device=device)
        engine = LocalEngine(config)
        try:
            return [_decode_seconds(engine, batch) for batch in BATCHES], _prompt_seconds(engine)
        finally:
            engine.close()


def _decode_seconds(engine: LocalEngine, batch: int) -> float:
    """Median of a step that decodes `batch` sequences."""
    items = [Item(tuple(range(3, 11)), STEPS + 8) for _ in range(batch)]
    for request in requests_of(items, engine.info, f"host-{batch}"):
        engine.submit(request)
    spent = []
    while engine.engine.has_work:
        began = time.perf_counter()
        engine.poll(0.0)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[4:-2])


def _prompt_seconds(engine: LocalEngine) -> float:
    """Median of a step of `PROMPT` rows of one prompt."""
    spent = []
    for turn in range(7):
        items = [Item(tuple(3 + (i * 7 + turn) % 300 for i in range(PROMPT)), 1)]
        [request] = requests_of(items, engine.info, f"prompt-{turn}")
        engine.submit(request)
        began = time.perf_counter()
        engine.poll(0.0)
        spent.append(time.perf_counter() - began)
        while engine.engine.has_work:
            engine.poll(0.0)
    return statistics.median(spent[1:])
