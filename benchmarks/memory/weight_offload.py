"""Decode with weights that do not fit: beside the disk's own rate, and a model that just fits beside one in memory.

    python -m benchmarks.memory.weight_offload ...

    disk     a model of twice the allowed memory; reads of the same file, in turns
    fits     a model that just fits in the allowed memory, and without a limit
    experts  the share of experts found in memory, by what is allowed (random routers)

Random weights of a real shape (`--shape`, `--layers` for less of it). The file lies in `--folder`, which must be on the
disk that is meant. `disk` tells tokens a second as a share of (bytes read a second by the same requests) / (bytes that
a token has to read); the goal is 0.8. Medians; every round times both, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common.results import measure, parser_of
from benchmarks.memory.model_loading import OLMOE
from quire.bench.suite.foreign.shapes import SHAPES
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.model.offload.offloaded import pages
from quire.model.offload.stream import SLOTS, Streamed, turns


def engine_of(config: dict[str, Any], **more: Any) -> Engine:
    """Of random weights for `config`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = {"model": folder, "load_format": "dummy", "device": "cpu", "max_model_len": 512, "num_blocks": 64}
        return start_engine(flat_config(**options, max_num_seqs=4, tune="off", **more))


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The config of `--shape`, cut to `--layers`."""
    return SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})


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
    with closing(engine_of(config, quantization=args.quantization)) as plain:
        whole, resident = plain.model.weight_bytes, decode(plain, args.tokens)
    del plain
    limit = {
        "weight_offload": "disk",
        "weight_memory_gib": whole / 2 / 2**30,
        "weight_offload_folder": str(args.folder),
    }
    with closing(engine_of(config, quantization=args.quantization, **limit)) as engine:
        source = engine.model.decoder.source  # type: ignore[attr-defined]
        assert isinstance(source, Streamed)
        token, raw = [], []
        for _ in range(args.rounds):
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
    with closing(engine_of(config, quantization=args.quantization)) as plain:
        most = plain.model.weight_bytes * 1.002 + (1 << 20)
        limit = limited(args, "disk", most)
        with closing(engine_of(config, quantization=args.quantization, **limit)) as engine:
            kind = type(engine.model.decoder.source).__name__  # type: ignore[attr-defined]
            pairs = [(decode(plain, args.tokens), decode(engine, args.tokens)) for _ in range(args.rounds)]
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
            seconds = statistics.median(decode(engine, args.tokens) for _ in range(args.rounds))
            counts = engine.model.decoder.source.counts()  # type: ignore[attr-defined]
        found[f"tokens/s with {part:.0%}"] = 1 / seconds
        found[f"experts found in memory with {part:.0%}"] = 1 - counts.missed / max(1, counts.needed)
    return found | {"load": os.getloadavg()[0]}


WHAT = {"disk": disk, "fits": fits, "experts": experts}


def main() -> None:
    """What is asked for, as records."""
    parser = parser_of(__doc__, WHAT)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("build/offload"))
    args = parser.parse_args()
    args.quantization = None if args.quantization == "none" else args.quantization
    measure(WHAT, args, "offload")


if __name__ == "__main__":
    main()
