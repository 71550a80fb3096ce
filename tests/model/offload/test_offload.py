"""Layers that come from a file: the bits of the model in memory, how much stays, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_adapters import TARGETS, write_adapter
from offloaded_model import OPTIONS, answers, least_gib, offloaded
from offloaded_model import folder as folder
from oracle import BACKENDS, write
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.offload import OffloadConfig
from quire.engine.start import start_engine
from quire.model.net.decoder import Resident
from quire.model.offload.offloaded import PAGE, pages
from quire.model.offload.stream import PIECE, Segment, Streamed, turns
from quire.ops.backend import open_backend

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
SELF = '{"method": "self", "layers": 2, "num_speculative_tokens": 3, "adaptive": false}'
FORMS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"},
    "int4": {"quantization": "int4"},
    "a table": {"quantization": "nf4"},
    "8 bits, op by op": {"quantization": "int8", "enforce_eager": True},
    "its first layers draft": {"dtype": "float32", "speculative_config": SELF},
    "the same in 4 bits drafts": {
        "speculative_config": '{"method": "self", "quantization": "int4", "adaptive": false}',
    },
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
def test_layers_from_a_file_give_the_bits_of_those_in_memory(form: str, folder: Path, tmp_path: Path) -> None:
    want = answers(start_engine(flat_config(model=str(folder), **OPTIONS | FORMS[form])))
    least = least_gib(folder, weight_offload="disk", weight_offload_folder=str(tmp_path), **FORMS[form])
    for gib, some in ((least, False), (1.7 * least, True)):
        engine = offloaded(folder, tmp_path, gib, **FORMS[form])
        source = engine.model.decoder.source  # type: ignore[attr-defined]
        assert isinstance(source, Streamed)
        away = [i for i in range(7) if i in source._turn]
        assert 2 <= len(away) < 7 if some else len(away) == 7
        before = source.counts().read
        assert answers(engine) == want
        assert source.counts().read - before >= 9 * source.nbytes, "every step read them"
    assert not [*tmp_path.iterdir()], "nothing is left in the folder"


def test_adapters_stay_beside_layers_that_come(tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama", num_hidden_layers=5)
    adapter = write_adapter(tmp_path / "a", oracle, TARGETS["llama"], 1)
    lora = {"dtype": "float32", "enable_lora": True, "lora_modules": (f"one={adapter}",)}
    options = OPTIONS | lora | {"model": str(tmp_path / "m")}
    want = answers(start_engine(flat_config(**options)), "one")
    assert want != answers(start_engine(flat_config(**options)))
    least = least_gib(tmp_path / "m", weight_offload="disk", **lora)
    engine = offloaded(tmp_path / "m", tmp_path, least, **lora)
    assert isinstance(engine.model.decoder.source, Streamed)  # type: ignore[attr-defined]
    assert answers(engine, "one") == want


def test_each_rank_reads_its_own_share(folder: Path, tmp_path: Path) -> None:
    ranks = {"tensor_parallel_size": 2, "dtype": "float32", "threads": 1}
    want = answers(start_engine(flat_config(model=str(folder), **OPTIONS | ranks)))
    alone = least_gib(folder, weight_offload="disk", dtype="float32")
    engine = offloaded(folder, tmp_path, 2 * alone, **ranks)
    assert isinstance(engine.model.decoder.source, Streamed)  # type: ignore[attr-defined]
    assert answers(engine) == want


def test_a_model_that_fits_is_not_streamed(folder: Path, tmp_path: Path) -> None:
    plain = start_engine(flat_config(model=str(folder), dtype="float32", **OPTIONS))
    exact = (plain.model.weight_bytes + 8 * PAGE) / 2**30
    want = answers(plain)
    for gib in (exact, 1.0):
        engine = offloaded(folder, tmp_path, gib, dtype="float32")
        assert isinstance(engine.model.decoder.source, Resident)  # type: ignore[attr-defined]
        assert answers(engine) == want


def test_layers_that_stay_are_spread_over_the_model(folder: Path, tmp_path: Path) -> None:
    least = least_gib(folder, weight_offload="disk", dtype="float32")
    plain = start_engine(flat_config(model=str(folder), dtype="float32", **OPTIONS)).model.weight_bytes / 2**30
    engine = offloaded(folder, tmp_path, least + 0.5 * (plain - least), dtype="float32")
    stay = [i for i in range(7) if i not in engine.model.decoder.source._turn]  # type: ignore[attr-defined]
    assert 2 <= len(stay) <= 4 and max(b - a for a, b in zip(stay, [*stay[1:], 7], strict=True)) <= 4, stay


@pytest.mark.parametrize(("slots", "layers"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 7)])
def test_layers_lie_in_their_slots_in_whatever_order_they_are_walked(slots: int, layers: int, tmp_path: Path) -> None:
    ops = open_backend(flat_config(device="cpu", threads=1).device)
    size = PIECE + 3 * PAGE
    content = np.random.default_rng(0).integers(0, 255, (layers, size), np.uint8)
    path = tmp_path / "weights"
    content.tofile(path)
    memory = [pages(size) for _ in range(slots)]
    with path.open("rb") as file:
        segments = [Segment(i, file.fileno(), i * size, size, 0) for i in range(layers)]
        stream = turns(ops, memory, segments, layers, True)
        walks: list[list[int]] = [[*range(layers)]] * 2 + [
            [0],
            [0, layers - 1],
            [*range(layers)][::-1],
            [*range(layers)],
        ]
        for walk in walks:
            for layer in walk:
                stream.call("stream_wait", layer)
                assert np.array_equal(memory[layer % slots], content[layer])
                stream.call("stream_done", layer)
        with pytest.raises(ValueError, match="there is no such layer"):
            stream.call("stream_wait", layers)
        stream.close()


def test_parts_of_a_layer_come_from_several_files(tmp_path: Path) -> None:
    ops = open_backend(flat_config(device="cpu", threads=1).device)
    names = [tmp_path / name for name in "abc"]
    for i, name in enumerate(names):
        name.write_bytes(bytes([i + 1]) * PAGE)
    files = [name.open("rb") for name in names]
    memory = pages(3 * PAGE)
    segments = [Segment(0, file.fileno(), 0, PAGE, i * PAGE) for i, file in enumerate(files)]
    stream = turns(ops, [memory], segments, 1, True, *files)
    stream.call("stream_wait", 0)
    assert [int(memory[i * PAGE + 7]) for i in range(3)] == [1, 2, 3]
    del stream
    gc.collect()
    assert all(file.closed for file in files)


def test_a_file_that_ends_early_is_an_error_and_may_come_back(tmp_path: Path) -> None:
    ops = open_backend(flat_config(device="cpu", threads=1).device)
    path = tmp_path / "weights"
    path.write_bytes(b"x" * PAGE)
    with path.open("rb") as file:
        stream = turns(ops, [pages(2 * PAGE)], [Segment(0, file.fileno(), 0, 2 * PAGE, 0)], 1, True)
        with pytest.raises(ValueError, match="weights cannot be read while a step runs"):
            stream.call("stream_wait", 0)
        path.write_bytes(b"x" * 2 * PAGE)
        stream.call("stream_wait", 0)
        stream.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weight_memory_gib": ({"weight_memory_gib": 1.0}, "needs --weight-offload"),
    "weight_offload_folder": ({"weight_offload_folder": "/x"}, "needs --weight-offload"),
    "weight_offload": ({"weight_offload": "tape"}, "is not one of none, disk"),
    "cpu_offload_gb": ({"cpu_offload_gb": -1.0}, "must lie in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_say_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name][1]) as refused:
        flat_config(**REFUSED[name][0])
    assert refused.value.param == name


LOADS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cpu_offload_gb": lambda _: {"cpu_offload_gb": 1.0},
    "cache_packed": lambda room: {"weight_offload": "disk", "cache_packed": str(room)},
    "weight_offload": lambda _: {"weight_offload": "experts"},
    "weight_offload_folder": lambda room: {
        "weight_offload": "disk", "weight_memory_gib": 1e-6, "weight_offload_folder": str(room / "config.json" / "x")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_what_cannot_be_is_refused_at_the_start(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        start_engine(flat_config(model=str(folder), **OPTIONS | LOADS[name](folder)))
    assert refused.value.param == name, refused.value.message


def test_the_reference_reads_weights_of_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the torch reference reads weights of its own"):
        start_engine(flat_config(model=str(folder), device="reference", weight_offload="disk"))


def test_nothing_is_asked_unless_it_is() -> None:
    assert not OffloadConfig().from_file
