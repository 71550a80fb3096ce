"""Peak memory of loading: what a process holds at most while a model of a real shape is read and packed.

    python -m benchmarks.memory.model_loading [NAME ...]

Unless named, llama-1b (bf16 to int4) and olmoe (a mixture, bf16 to int8).

The weights are a file of zeros with holes: a load takes the memory that it takes with any numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire.bench.suite.foreign.shapes import COMMON, SHAPES

OLMOE = COMMON | {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "vocab_size": 50304, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"llama-1b": (SHAPES["llama-1b"], "int4"), "olmoe": (OLMOE, "int8")}


def write_zeros(folder: Path) -> None:
    """A model.safetensors for the config in `folder`, bf16, which takes no room on disk."""
    from quire.model.describe import open_model

    header, at = {}, 0
    for name, info in open_model(str(folder), "dummy").source.infos.items():
        header[name] = {"dtype": "BF16", "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. Linux only."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(folder: str, quantization: str) -> dict[str, float]:
    """Load in this process: bytes before, bytes more at the peak, bytes of the packed weights, seconds."""
    from quire.core.config import DeviceConfig, flat_config
    from quire.model.build import load_model
    from quire.ops.backend import open_backend

    ops = open_backend(DeviceConfig())
    options = {} if quantization == "none" else {"quantization": quantization}
    before, began = memory("VmRSS"), time.perf_counter()
    model = load_model(flat_config(model=folder, cache_packed="off", **options), ops)
    seconds = time.perf_counter() - began
    return {"before": before, "peak": memory("VmHWM") - before, "packed": model.weight_bytes, "seconds": seconds}


def measured(folder: Path, quantization: str) -> dict[str, float]:
    """Measure a load in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(folder), quantization]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure the named models."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all unless named")
    for name in parser.parse_args().names or MODELS:
        if name not in MODELS:
            parser.error(f"{name!r} is not one of {', '.join(MODELS)}")
        config, quantization = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            write_zeros(Path(folder))
            found = measured(Path(folder), quantization)
        mib = {key: f"{found[key] / 2**20:,.0f} MiB" for key in ("peak", "packed")}
        print(f"{name} to {quantization}: {mib['peak']} more at the peak, {mib['packed']} packed, "
              f"{found['seconds']:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
