"""Experts that come from a file when a router chooses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from offloaded_model import OPTIONS, answers, least_gib, offloaded
from oracle import BACKENDS, write
from quire.core.config import flat_config
from quire.engine.start import start_engine
from quire.model.net.decoder import Resident
from quire.model.offload.expert_offload import ExpertPool
from quire.model.offload.offloaded import PAGE, pages
from quire.model.offload.stream import Stream
from quire.ops.arrays import address
from quire.ops.backend import open_backend

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", EIGHT, {"dtype": "float32"}),
    "mixtral in int4": ("mixtral", EIGHT, {"quantization": "int4"}),
    "gpt_oss, biases, op by op": ("gpt_oss", EIGHT | {"head_dim": 16}, {"dtype": "float32", "enforce_eager": True}),
    "latent attention": ("deepseek_v3", SIZES | GROUPS, {"dtype": "float32"}),
    "some layers dense, an expert shared": (
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 4,
         "shared_expert_intermediate_size": 64, "intermediate_size": 96, "decoder_sparse_step": 2},
        {"quantization": "int8"},
    ),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["experts", "disk"])
def test_experts_from_a_file_give_the_bits_of_those_in_memory(name: str, kind: str, tmp_path: Path) -> None:
    family, facts, options = MODELS[name]
    folder, room = tmp_path / "model", tmp_path / "room"
    write(folder, family, **facts)
    plain = start_engine(flat_config(model=str(folder), **OPTIONS | options))
    whole, want = plain.model.weight_bytes / 2**30, answers(plain)
    least = least_gib(folder, weight_offload=kind, weight_offload_folder=str(room), **options)
    for gib in (least, (least + whole) / 2):
        engine = offloaded(folder, room, gib, kind, **options)
        source = engine.model.decoder.source  # type: ignore[attr-defined]
        assert not isinstance(source, Resident)
        assert answers(engine) == want, gib
        if isinstance(source, ExpertPool):
            counts = source.counts()
            assert 0 < counts.missed < counts.needed
    roomy = offloaded(folder, room, 1.0, kind, **options)
    assert isinstance(roomy.model.decoder.source, Resident)  # type: ignore[attr-defined]
    assert answers(roomy) == want


def test_experts_chosen_most_stay(tmp_path: Path) -> None:
    ops = open_backend(flat_config(device="cpu", threads=1).device)
    experts, slots = 6, 3
    content = np.repeat(np.arange(2 * experts, dtype=np.uint8), PAGE)
    path = tmp_path / "weights"
    content.tofile(path)
    memory, places = pages(slots * PAGE), [np.zeros(experts, np.int64) for _ in range(2)]
    with path.open("rb") as file:
        rows = [(file.fileno(), i * experts * PAGE, PAGE, experts, int(p.ctypes.data)) for i, p in enumerate(places)]
        table = np.array(rows, np.int64)
        at = address(memory), PAGE, slots, int(table.ctypes.data), 2
        stream = Stream(ops, "stream_experts", (memory, places), True, *at)

        def need(layer: int, *wanted: int) -> None:
            counts = np.isin(np.arange(experts), wanted)
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
            stream.call("stream_need", layer, int(offsets.ctypes.data))
            for expert in wanted:
                place = int(places[layer][expert])
                assert place >= 0 and int(memory[place + 5]) == layer * experts + expert

        for _ in range(5):
            need(0, 1, 4)
        for expert in (0, 2, 3):
            need(1, expert)
        assert (places[0] >= 0).tolist() == [e in (1, 4) for e in range(experts)], "the hot ones are there"
        assert (places[1] >= 0).tolist() == [e == 3 for e in range(experts)]
        assert stream.counts()[2:] == (13, 5)
        need(1, 0, 1, 2)
        with pytest.raises(ValueError, match="more experts at once than the pool has room for"):
            need(1, 0, 1, 2, 3)
        stream.close()
