"""What plans need to know of this machine, measured: rates of kernels, and what a step costs beside them."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from quire.bench.workload import Item, requests_of
from quire.core.config import DeviceConfig, flat_config
from quire.core.progress import stage
from quire.engine.local import LocalEngine
from quire.figures.machine import now
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.thread_probe import READ_BYTES, read_rate
from quire.ops.native import huge_bytes
from quire.plan import calibrate
from quire.plan.memory import KEPT, PROCESS
from quire.plan.rates import Calibration, far_bytes, keep

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


def measured(
    device: DeviceConfig,
    key: str,
    found: Calibration | None,
    lacking: Collection[str],
    kv: str,
    before_part: Callable[[], None],
) -> Calibration:
    """`found` with what it lacks (everything where it is None), measured now and kept under `key`.

    `before_part` is called before each part; what it raises ends this, and formats that were measured stay kept.
    """
    wanted = kv not in (found.attention if found is not None else {})
    with stage("calibrating this machine, once", (found is None) + len(lacking) + wanted) as at:
        ops = open_backend(device)

        def begin(what: str) -> None:
            before_part()
            at.update(note=what)

        if found is None:
            begin("memory, calls and steps")
            found = _basics(ops, key, device)
            at.advance()
        if wanted:
            begin(f"attention over keys and values in {kv}")
            rates_of_kv = calibrate.attention_rates(ops, KEPT[kv], far=far_bytes())
            found = replace(found, attention={**found.attention, kv: rates_of_kv}, measured=now())
            at.advance()
        for kind in sorted(lacking):
            begin(f"products of {kind}")
            rates = calibrate.kind_rates(ops, kind, far=far_bytes())
            found = replace(found, kinds={**found.kinds, kind: rates}, measured=now())
            keep(found)  # the next run goes on from here
            at.advance()
        keep(found)
    return found


def _basics(ops: Ops, key: str, device: DeviceConfig) -> Calibration:
    data = huge_bytes(READ_BYTES)
    data.fill(0)
    return Calibration(
        machine=key,
        read_bytes_per_s=read_rate(ops.native, data),
        call=calibrate.call_seconds(ops),
        kinds={},
        attention={},
        recurrence=calibrate.recurrence_rates(ops, far=far_bytes()),
        norms=calibrate.norm_seconds(ops),
        ropes=calibrate.rope_seconds(ops),
        sample=calibrate.sample_seconds(ops),
        host=host_seconds(device),
        process=PROCESS,
    )


def host_seconds(device: DeviceConfig) -> tuple[float, float, float, float]:
    """Host seconds of a step, of a sequence in it, of a row of it, of a layer whose ops are called: engines of one and
    of `LAYERS` layers that compute next to nothing.
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
