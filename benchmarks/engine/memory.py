"""Memory: peaks of loading, weights that do not fit, and the store behind the KV cache.

    python -m benchmarks.engine.memory ...

    load     bytes that a process holds at most while a model is read and packed: llama-1b (bf16 to int4), and a mixture
             (OLMoE's sizes, bf16 to int8)
    disk     decode with a model of twice the allowed memory; reads of the same file, in turns
    fits     a model that just fits in the allowed memory, and without a limit
    experts  the share of experts found in memory, by what is allowed (random routers)
    restart  `--kv-store`: share of prompts' tokens found at the first start's end and at the second's
    ttft     `--kv-store`: a prefix of 4,000 tokens that is read, beside one that is computed

`load`: the weights are a file of zeros with holes, since a load takes the memory that it takes with any numbers.
`disk`, `fits`, `experts`: random weights of `--shape`, cut to `--layers`, not quantized unless told. The file lies in
`--folder`, which must be on the disk that is meant. `disk` tells tokens a second as a share of (bytes read a second by
the same requests) / (bytes that a token has to read); the goal is 0.8. Medians; every round times both.
`restart`, `ttft`: random weights of `--shape` in int8 unless told. Each round of `ttft` is a start of its own: it
computes the prefix that the next one reads, in turns before and after. In every second round the files were taken out
of the system's page cache before ("cold"). Results: results/offload.json, results/kv_store.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, measure, parser_of
from quire.bench.suite.foreign.shapes import COMMON, SHAPES, write_checkpoint
from quire.core.config import DeviceConfig, flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.model.build import load_model
from quire.model.describe import open_model
from quire.model.offload.offloaded import pages
from quire.model.offload.stream import SLOTS, Streamed, turns
from quire.ops.backend import open_backend

OLMOE = COMMON | {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "vocab_size": 50304, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"llama-1b": (SHAPES["llama-1b"], "int4"), "olmoe": (OLMOE, "int8")}


def write_zeros(folder: Path) -> None:
    """A model.safetensors for the config in `folder`, bf16, which takes no room on disk."""
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


def loaded(folder: str, quantization: str) -> dict[str, float]:
    """Load in this process: bytes before, bytes more at the peak, bytes of the packed weights, seconds."""
    ops = open_backend(DeviceConfig())
    options = {} if quantization == "none" else {"quantization": quantization}
    before, began = memory("VmRSS"), time.perf_counter()
    model = load_model(flat_config(model=folder, cache_packed="off", **options), ops)
    seconds = time.perf_counter() - began
    return {"before": before, "peak": memory("VmHWM") - before, "packed": model.weight_bytes, "seconds": seconds}


def measured(folder: Path, quantization: str) -> dict[str, float]:
    """Measure a load in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.memory", "--measure", str(folder), quantization]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Each model in a process of its own."""
    found = {}
    for name, (config, quantization) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            write_zeros(Path(folder))
            found[f"{name} to {quantization}"] = measured(Path(folder), quantization)
    return found


# -------------------------------------------------------------------------------------------- weights that do not fit


def engine_of(config: dict[str, Any], **more: Any) -> Engine:
    """Of random weights for `config`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = {"model": folder, "load_format": "dummy", "device": "cpu", "max_model_len": 512, "num_blocks": 64}
        return start_engine(flat_config(**options, max_num_seqs=4, tune="off", **more))


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The config of `--shape`, cut to `--layers`."""
    return SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})


def own_format(args: argparse.Namespace) -> str | None:
    """How weights are quantized; None: they are not."""
    return None if args.quantization in ("", "none") else str(args.quantization)


def limited(args: argparse.Namespace, kind: str, nbytes: float) -> dict[str, Any]:
    """The options of `nbytes` of weights in memory."""
    options = {"weight_offload": kind, "weight_memory_gib": nbytes / 2**30}
    return options | {"weight_offload_folder": str(args.folder)}


def decode(engine: Engine, tokens: int) -> float:
    """Seconds of a token: of `tokens` decode steps of one sequence, all after a short prompt."""
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id=str(time.monotonic_ns()), prompt=tuple(range(9)), params=params, seed=0, arrival=0.0))
    engine.step()
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - began) / tokens


def raw_seconds(engine: Engine, source: Streamed, rounds: int) -> float:
    """Seconds to read all that a step reads, by the same threads in the same requests, with nothing beside."""
    ops, layers = engine.ops, len(source.sizes)
    slots = [pages(max(source.sizes)) for _ in range(SLOTS)]
    stream = turns(ops, slots, source.segments, layers, source.cached)
    for turn in range(len(slots)):
        stream.call("stream_wait", turn)
    began, before = time.perf_counter(), stream.counts().read
    for _ in range(rounds):
        for turn in range(layers):
            stream.call("stream_wait", turn)
            stream.call("stream_done", turn)
    seconds, read = time.perf_counter() - began, stream.counts().read - before
    stream.close()
    return seconds * source.nbytes / read


def disk(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second beside reads."""
    config = shape_of(args)
    with closing(engine_of(config, quantization=own_format(args))) as plain:
        whole, resident = plain.model.weight_bytes, decode(plain, args.tokens)
    del plain
    limit = limited(args, "disk", whole / 2)
    with closing(engine_of(config, quantization=own_format(args), **limit)) as engine:
        source = engine.model.decoder.source  # type: ignore[attr-defined]
        assert isinstance(source, Streamed)
        token, raw = [], []
        for _ in range(args.rounds or 7):
            token.append(decode(engine, args.tokens))
            raw.append(raw_seconds(engine, source, max(1, args.tokens // 4)))
        away, direct = source.nbytes, not source.cached
    shares = [r / t for r, t in zip(raw, token, strict=True)]
    return {
        "weights": whole, "allowed": whole // 2, "read a token": away, "direct reads": direct,
        "disk MB/s": away / statistics.median(raw) / 1e6, "tokens/s": 1 / statistics.median(token),
        "share of the disk's rate": statistics.median(shares), "shares": [round(s, 3) for s in shares],
        "share by all of the model's bytes": statistics.median(shares) * whole / away,
        "tokens/s in memory": 1 / resident, "load": os.getloadavg()[0],
    }  # fmt: skip


def fits(args: argparse.Namespace) -> dict[str, Any]:
    """A model that just fits beside one without a limit, in turns."""
    config = shape_of(args)
    with closing(engine_of(config, quantization=own_format(args))) as plain:
        most = plain.model.weight_bytes * 1.002 + (1 << 20)
        limit = limited(args, "disk", most)
        with closing(engine_of(config, quantization=own_format(args), **limit)) as engine:
            kind = type(engine.model.decoder.source).__name__  # type: ignore[attr-defined]
            pairs = [(decode(plain, args.tokens), decode(engine, args.tokens)) for _ in range(args.rounds or 7)]
    ratios = [without / limited for without, limited in pairs]
    return {
        "source": kind, "tokens/s without a limit": 1 / statistics.median(a for a, _ in pairs),
        "tokens/s that just fits": 1 / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios), "ratios": [round(r, 3) for r in ratios], "load": os.getloadavg()[0],
    }  # fmt: skip


def experts(args: argparse.Namespace) -> dict[str, Any]:
    """Hits and tokens a second of a mixture whose experts come as they are chosen."""
    config, found = OLMOE | ({"num_hidden_layers": args.layers} if args.layers else {}), {}
    with closing(engine_of(config, quantization="int4")) as plain:
        whole, found["tokens/s in memory"] = plain.model.weight_bytes, 1 / decode(plain, args.tokens)
    del plain
    for part in (0.75, 0.5):
        limit = limited(args, "experts", whole * part)
        with closing(engine_of(config, quantization="int4", **limit)) as engine:
            seconds = statistics.median(decode(engine, args.tokens) for _ in range(args.rounds or 7))
            counts = engine.model.decoder.source.counts()  # type: ignore[attr-defined]
        found[f"tokens/s with {part:.0%}"] = 1 / seconds
        found[f"experts found in memory with {part:.0%}"] = 1 - counts.missed / max(1, counts.needed)
    return found | {"load": os.getloadavg()[0]}


# ----------------------------------------------------------------------------------------------------------- KV store


def stored_engine(args: argparse.Namespace) -> Engine:
    """A start with the store."""
    folder = args.work.absolute() / f"{args.shape}-weights"
    if not (folder / "config.json").exists():
        write_checkpoint(args.shape, folder)
    options = {"quantization": args.quantization or "int8", "kv_cache_memory_bytes": 2 << 30, "max_model_len": 4096}
    return start_engine(flat_config(model=str(folder), kv_store=str(args.store), kv_store_gb=4.0, **options))


def prompt_of(args: argparse.Namespace, name: str, tokens: int) -> tuple[int, ...]:
    """So many random tokens, the same for the same name."""
    rng = random.Random(name)
    return tuple(rng.randrange(16, SHAPES[args.shape]["vocab_size"]) for _ in range(tokens))


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token of a request that runs alone, and how many tokens of it were found."""
    asked = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    begin, seconds, found = time.perf_counter(), 0.0, 0
    engine.submit(Request(id=f"r{begin}", prompt=prompt, params=asked, seed=0, arrival=begin))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            seconds = seconds or time.perf_counter() - begin
            found = output.cached_tokens
    return seconds, found


def out_of_page_cache(folder: Path) -> None:
    """Have the system read the files from the disk the next time."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    """Both ways in every start but the first, which has nothing to read."""
    tail, found = prompt_of(args, "tail", 32), dict[str, list[float]]()
    for start in range((args.rounds or 4) + 1):
        ways = {"computed": f"prefix {start}", "stored": f"prefix {start - 1}"}
        names = [name for name in ways if start or name == "computed"]
        cold = start % 2 == 0
        if cold and start:
            out_of_page_cache(args.store)
        engine = stored_engine(args)
        first_token(engine, prompt_of(args, f"warm up {start}", 64))
        for name in names if start % 4 < 2 else reversed(names):
            seconds, cached = first_token(engine, prompt_of(args, ways[name], args.prefix) + tail)
            assert (cached >= args.prefix // 16 * 16) == (name == "stored"), (name, cached)
            if start:
                key = name if name == "computed" else f"stored {'cold' if cold else 'warm'}"
                found.setdefault(key, []).append(seconds)
        engine.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    times = {name: medians["computed"] / value for name, value in medians.items() if name != "computed"}
    return {"prefix": args.prefix, "seconds": found, "median_s": medians, "times_faster": times}


def restart(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts that share beginnings, twice; then once after a restart."""
    stems = [prompt_of(args, f"stem {i}", 384) for i in range(4)]
    prompts = [stems[i % 4] + prompt_of(args, f"own {i}", 64) for i in range(16)]
    rates = []
    for times in (2, 1):
        engine = stored_engine(args)
        for _ in range(times):
            shares = [first_token(engine, prompt)[1] / len(prompt) for prompt in prompts]
            rates.append(statistics.mean(shares))
        engine.close()
    return {"first_start": rates[0], "its_end": rates[1], "second_start": rates[2]}


WORK = {"load": load, "disk": disk, "fits": fits, "experts": experts, "restart": restart, "ttft": ttft}
FILES = {"load": "loading"} | dict.fromkeys(("disk", "fits", "experts"), "offload")


def main() -> None:
    """Run some of them, print and keep what they found."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(loaded(*sys.argv[2:])))
        return
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: as many as it has")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that disk, fits and experts decode")
    parser.add_argument("--rounds", type=int, default=0, help="0: 4 of ttft, 7 of the others")
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--folder", type=Path, default=Path("build/offload"))
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.store = args.work.absolute() / "kv-store"
    shutil.rmtree(args.store, ignore_errors=True)
    try:
        measure(WORK, args, dict.fromkeys(WORK, "kv_store") | FILES)
    finally:
        shutil.rmtree(args.store, ignore_errors=True)


if __name__ == "__main__":
    main()
