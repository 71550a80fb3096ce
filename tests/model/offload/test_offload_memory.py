"""A model larger than the memory it may have: what a load takes at most, and decoding under a limit of the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.memory import write_zeros
from quire.ops.native import load_native

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="quire._native is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]
LAYERS, MIB = 16, 1 << 20
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 512, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
"""Bytes: 32 MiB, of which there are 512 in all."""
PROCESS = 64 * MIB
"""Of the process: code that runs for the first time, threads, the cache of a few blocks."""
CHILD = """
import json, os, re, sys
from pathlib import Path
group, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.backend import open_backend

def memory(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

config = flat_config(model=folder, device="cpu", threads=2, num_blocks=8, max_num_batched_tokens=16, max_num_seqs=2,
                     **options)
open_backend(config.device)
before = memory("VmRSS")
if group:
    Path(group, "tasks").write_text(str(os.getpid()))
    Path(group, "memory.limit_in_bytes").write_text(str(288 << 20))
engine = start_engine(config)
peak = memory("VmHWM") - before
engine.submit(Request(id="r", prompt=(5, 6, 7), params=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
                      seed=0, arrival=0.0))
tokens = []
while engine.has_work:
    tokens += [t for out in engine.step() for t in out.tokens]
print(json.dumps({"peak": peak, "tokens": tokens}))
"""


def child(folder: Path, group: Path | None, **options: Any) -> subprocess.CompletedProcess[str]:
    args = [str(group or ""), str(folder), json.dumps(options)]
    return subprocess.run([sys.executable, "-c", CHILD, *args], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_load_takes_what_is_allowed_and_a_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_zeros(tmp_path)
    allowed = 128 * MIB
    options = {"weight_offload": "disk", "weight_memory_gib": allowed / 2**30, "weight_offload_folder": str(tmp_path)}
    found = child(tmp_path, None, **options)
    assert found.returncode == 0, found.stderr
    peak = json.loads(found.stdout)["peak"]
    assert peak <= allowed + 2 * LAYER + PROCESS, f"{peak / MIB:.0f} MiB"
    assert len(json.loads(found.stdout)["tokens"]) == 6


@pytest.fixture
def group() -> Iterator[Path]:
    made = Path(f"/sys/fs/cgroup/memory/quire-test-{os.getpid()}")
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield made
    made.rmdir()


@pytest.mark.slow
def test_a_model_of_twice_the_memory_decodes_under_a_limit_of_the_system(tmp_path: Path, group: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    dummy = {"load_format": "dummy"}
    whole = child(tmp_path, None, **dummy)
    assert whole.returncode == 0, whole.stderr
    half = {"weight_offload": "disk", "weight_memory_gib": 0.125, "weight_offload_folder": str(tmp_path)} | dummy
    limited = child(tmp_path, group, **half)
    assert limited.returncode == 0, limited.stderr
    assert json.loads(limited.stdout)["tokens"] == json.loads(whole.stdout)["tokens"]
    assert int((group / "memory.max_usage_in_bytes").read_text()) <= 288 * MIB
    assert child(tmp_path, group, **dummy).returncode == -9, "without, the system ends it"
