"""Replicas that keep one copy of their layers: the same bits, one copy, and who writes it when one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oracle import BACKENDS, write
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.core.machine import memory_file
from quire.engine.engine import Engine
from quire.model.load.place import parts_of
from quire.ops.weights import Packed
from test_offload import OPTIONS, answers

pytestmark = [
    pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name"),
]
SHARDED: dict[str, Any] = {"data_parallel_size": 2, "fully_shard": True}


def addresses(engine: Engine) -> list[int]:
    """Where the matrices of layers begin."""
    layers = engine.model.decoder.layers  # type: ignore[attr-defined]
    return [packed.handle.codes for packed in parts_of(layers, Packed)]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "int4"}], ids=["f32", "int4"])
def test_replicas_with_one_copy_say_what_one_alone_says(options: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=4)
    config = OPTIONS | options | {"model": str(tmp_path)}
    want, file = answers(Engine(flat_config(**config))), memory_file()
    first = Engine(flat_config(**config | SHARDED), shards=file)
    size = os.fstat(file).st_blocks * 512
    second = Engine(flat_config(**config | SHARDED), shards=file)
    assert answers(first) == want == answers(second)
    assert os.fstat(file).st_blocks * 512 == size > 0, "the second added nothing"
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:quire" in line]
    spans = [(*(int(a, 16) for a in line[0].split("-")), line[1]) for line in maps]
    for at in (*addresses(first), *addresses(second)):
        assert any(begin <= at < end for begin, end, _ in spans), "a layer's matrix is elsewhere"
    os.close(file)


def test_weights_of_other_files_are_found_out(tmp_path: Path) -> None:
    file = memory_file()
    for seed in (0, 1):
        write(tmp_path / str(seed), "llama", seed=seed)
    config = OPTIONS | SHARDED
    Engine(flat_config(model=str(tmp_path / "0"), **config), shards=file)
    with pytest.raises(ModelError, match="layer 0 is not what another replica made"):
        Engine(flat_config(model=str(tmp_path / "1"), **config), shards=file)
    os.close(file)


DIES = """
import os, sys
from quire.model.offload.shards import SharedKeeper
keeper = SharedKeeper(int(sys.argv[1]))
assert keeper.writes
os.ftruncate(int(sys.argv[1]), 1 << 20)
print("locked", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_who_waits_for_a_replica_that_dies_writes_in_its_place(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    file, config = memory_file(), OPTIONS | SHARDED | {"model": str(tmp_path)}
    command = [sys.executable, "-c", DIES, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(file,)) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(Engine, flat_config(**config), None, file)
            with pytest.raises(TimeoutError):
                loading.result(timeout=1.5)
            other.stdin.close()
            engine = loading.result(timeout=60)
    assert answers(engine) == answers(Engine(flat_config(**OPTIONS | {"model": str(tmp_path)})))
    os.close(file)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fully_shard": True}, "there is one replica"),
        (SHARDED | {"tensor_parallel_size": 2}, "have shares of the weights already"),
        (SHARDED | {"weight_offload": "disk"}, "cannot be shared in memory"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        flat_config(**options)
    assert refused.value.param == "fully_shard"


def test_an_engine_of_this_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    with pytest.raises(ConfigError, match="use quire serve"):
        Engine(flat_config(model=str(tmp_path), **OPTIONS | SHARDED))
