"""Layers of a GPU that stay on the host: right whenever copies happen, and the bits of layers on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fake_gpu import FakeRuntime
from oracle import write
from queueing_engine import MISSING, SMALL, request
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.engine.start import start_engine
from quire.model.net.decoder import Resident
from quire.model.offload.host import CopiedAhead
from quire.ops.reference.backend import ReferenceOps
from triton_ops import needs_triton
from turns import working

HOSTS = {layer: torch.full((64 + layer,), layer, dtype=torch.uint8) for layer in (0, 2, 3, 5, 6)}


@pytest.mark.parametrize("eager", ["side", "main"])
@pytest.mark.parametrize("walks", [[range(7)] * 3, [range(3), range(7), range(6, -1, -1), range(7)]])
def test_layers_are_there_whenever_copies_happen(eager: str, walks: list[range]) -> None:
    runtime, seen, want = FakeRuntime(eager), list[int](), list[int]()
    ops = ReferenceOps()
    ops.runtime = runtime
    source = CopiedAhead(ops, HOSTS)
    for walk in walks:
        for layer in walk:
            source.before(layer)
            if layer in HOSTS:
                data = source.slot_of(layer)[: 64 + layer]
                runtime.queue(lambda data=data: seen.append(int(data.min()) + 1000 * int(data.max())))  # type: ignore[misc]
                want.append(layer + 1000 * layer)
            source.after(layer)
    assert not seen and not runtime.waits, "the host waits for none of it"
    runtime.fetch([])()
    assert seen == want


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_engine_gives_the_same_bits(quantization: str | None, tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=5, hidden_size=32, intermediate_size=64, head_dim=16)
    device = {"device": "cuda", "ops": MISSING, "num_blocks": 64} | SMALL
    options: dict[str, Any] = device | {"model": str(tmp_path), "quantization": quantization}
    found = []
    for more in ({}, {"cpu_offload_gb": 1.0}):
        engine = start_engine(flat_config(**options | more))
        assert isinstance(engine.model.decoder.source, CopiedAhead if more else Resident)  # type: ignore[attr-defined]
        assert bool(engine.runner.step.graph_sizes) == (not more), "steps are not captured"
        for i, prompt in enumerate(((5, 6, 7), (9,) * 20)):
            engine.submit(request(i, prompt, logprobs=2))
        outputs: dict[str, list[Any]] = {}
        for _ in working(engine):
            for out in engine.step():
                outputs.setdefault(out.request_id, []).append((out.tokens, out.logprobs))
        found.append(outputs)
    assert found[0] == found[1]


@needs_triton
def test_an_amount_that_spares_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="spares no memory") as refused:
        start_engine(flat_config(model=str(tmp_path), device="cuda", ops=MISSING, cpu_offload_gb=0.001, **SMALL))
    assert refused.value.param == "cpu_offload_gb"
