"""Ranks of one thread beside one process of as many threads, and what an exchange between two processes takes.

    python -m benchmarks.engine.parallel_ranks ...

    exchange                    microseconds of a sum over two ranks, rows of 2,048 numbers, beside gloo's
    steps                       prefill, and decode of 1 and of 16 sequences, in turns
    rows                        the same with rows split between the joins
    runs                        the same with sums in runs, which give the same bits for any number of ranks
    stages                      the same of stages, whose prompts are cut finer, and how long stages waited
    context                     prefill and decode of one long sequence that ranks share, --context tokens
    experts --shape olmoe-like  the same with experts cut, whole on some ranks, or alone
    balance --shape olmoe-like  ranks' pairs with favourite tokens, before and after counts

Random weights of a real shape. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.common.results import measure, parser_of
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.core.config import DeviceConfig, flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.ops.backend import open_backend
from quire.parallel.rendezvous_store import RemoteStore, serve
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.torch_distributed import ArrayComm, DistributedComm, gloo_group
from quire.parallel.wire import listen
from quire.run.multi_rank import MultiRankExecutor

TIMES = 200


def timed(work: Callable[[], object], calls: int = 1) -> dict[str, float]:
    """Microseconds of one of the calls that `work` makes."""
    spent = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        spent.append(1e6 * (time.perf_counter() - begin) / calls)
    return {"median_us": statistics.median(spent), "least_us": min(spent)}


def exchange(args: argparse.Namespace) -> dict[str, Any]:
    """Of a call out of a recording, and of one over gloo; the other rank is a fork of this process, each has a core."""
    file, listener, secret = shared_memory(comm_bytes(2)), listen("127.0.0.1", 0), os.urandom(32)
    other = os.fork()
    rank = int(other == 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    ops, found = open_backend(DeviceConfig(device="cpu", threads=1)), {}
    comm = SharedComm(file, rank, 2)
    store = RemoteStore(*listener.getsockname(), secret, 1, 2) if rank else serve(listener, secret, 2)
    gloo = ArrayComm(DistributedComm(gloo_group(store, "exchange", rank, 2, "127.0.0.1")))
    for rows in (1, 16, 64, 512):
        ops.begin_step()
        x = np.zeros((rows, 2048), np.float32)
        recorded = ops.record(lambda x=x: [comm.all_reduce(ops, x) for _ in range(20)])  # type: ignore[misc]
        found[f"{rows} rows"] = timed(recorded.run, 20)
        found[f"{rows} rows, gloo"] = timed(lambda x=x: gloo.all_reduce(ops, x))  # type: ignore[misc]
    if rank:
        os._exit(0)
    os.waitpid(other, 0)
    return found


def requests_of(args: argparse.Namespace, count: int, length: int, tokens: int, turn: int) -> list[Request]:
    """Prompts that nobody has seen."""
    rng, asked = random.Random(f"{count} {turn}"), SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    words = range(16, SHAPES[args.shape]["vocab_size"])
    return [
        Request(id=f"{turn} {i}", prompt=tuple(rng.choices(words, k=length)), params=asked, seed=0, arrival=0.0)
        for i in range(count)
    ]


@dataclass
class Phase:
    """Tokens a second, and the share of the time that each rank waited for others."""

    rate: float
    bubbles: list[float]


def computed(engine: Engine) -> NDArray[np.float64]:
    """Seconds of each rank so far."""
    return engine.executor.ranks.busy.copy() if isinstance(engine.executor, MultiRankExecutor) else np.zeros(0)


def rate(engine: Engine, requests: list[Request]) -> tuple[Phase, Phase]:
    """Of the prompts, and of the answers past their first tokens."""
    before, begin = computed(engine), time.perf_counter()
    for request in requests:
        engine.submit(request)
    firsts, made, first_at, between = set[str](), 0, begin, before
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            made += len(output.tokens)
            firsts.add(output.request_id)
            if len(firsts) < len(requests) or first_at == begin:
                made, first_at, between = 0, time.perf_counter(), computed(engine)
    end, after = time.perf_counter(), computed(engine)

    def phase(tokens: int, seconds: float, busy: NDArray[np.float64]) -> Phase:
        return Phase(tokens / seconds, [float(1 - each / seconds) for each in busy])

    prompts = sum(len(r.prompt) for r in requests)
    return phase(prompts, first_at - begin, between - before), phase(made, end - first_at, after - between)


def own_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of every engine."""
    folder = write_config(args.shape, args.work.absolute() / args.shape)
    return {"model": str(folder), "load_format": "dummy", "quantization": args.quantization, "max_model_len": 1024,
            "device": "cpu"}  # fmt: skip


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Two ranks of one thread each, and one process of two threads."""
    return compare(args, {"ranks": {"tensor_parallel_size": args.ranks}})


def stages(args: argparse.Namespace) -> dict[str, Any]:
    """The same of stages; of one prompt, and of four that follow each other."""
    way = {"pipeline_parallel_size": args.ranks, "pipeline_micro_batches": args.micro_batches,
           "pipeline_layers": args.layers}  # fmt: skip
    return compare(args, {"ranks": way}, ((1, 512), (4, 512), (16, 32)))


def experts(args: argparse.Namespace) -> dict[str, Any]:
    """Ranks that have a part of each expert's width, or some whole experts, with attention split or not."""
    cut = {"tensor_parallel_size": args.ranks}
    whole = cut | {"enable_expert_parallel": True}
    return compare(args, {"cut": cut, "whole": whole, "alone": {"expert_parallel_size": args.ranks}})


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """Ranks with rows split between the joins beside ranks without."""
    whole = {"tensor_parallel_size": args.ranks}
    return compare(args, {"whole": whole, "split": whole | {"enable_sequence_parallel": True}})


def runs(args: argparse.Namespace) -> dict[str, Any]:
    """What the same bits at any number of ranks cost, in one process and over ranks."""
    over = {"tensor_parallel_size": args.ranks}
    ways = {"one in runs": {"threads": args.ranks}, "ranks": over, "ranks in runs": over}
    return compare(args, {name: way | {"rank_invariant": name.endswith("runs")} for name, way in ways.items()})


USUAL = ((1, 512), (16, 32))
"""Sequences, and tokens of each prompt."""


def compare(
    args: argparse.Namespace,
    ways: dict[str, dict[str, Any]],
    loads: tuple[tuple[int, int], ...] = USUAL,
    own: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Engines of ranks of one thread, each beside one process of as many threads, in turns. `own`: their options."""
    ways = {"one": {"threads": args.ranks}} | {name: {"threads": 1} | way for name, way in ways.items()}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        made = {name: start_engine(flat_config(**(own or own_options(args)), **way)) for name, way in ways.items()}
        engines = {name: stack.enter_context(closing(engine)) for name, engine in made.items()}
        for count, length in loads:
            rates: dict[str, list[tuple[Phase, Phase]]] = {name: [] for name in ways}
            for turn in range(args.rounds + 1):
                for name, engine in engines.items():
                    engine.ops.cpu.native.module.set_threads(engine.ops.threads)  # the pool is the process's
                    rates[name].append(rate(engine, requests_of(args, count, length, 48, turn)))
            for i, what in enumerate(("prefill", "decode")):
                phases = {name: [each[i] for each in all_[1:]] for name, all_ in rates.items()}
                medians = {name: statistics.median(each.rate for each in turns) for name, turns in phases.items()}
                bubbles = {f"bubbles of {name}": waited(turns) for name, turns in phases.items()}
                staged = {what: each for what, each in bubbles.items() if "pipeline_parallel_size" in ways[what[11:]]}
                found[f"{what} of {count}"] = medians | ratios(medians) | staged
    return found


def waited(turns: list[Phase]) -> list[float]:
    """The share of the time that each rank waited for others."""
    return [statistics.median(each) for each in zip(*(turn.bubbles for turn in turns), strict=True)]


def context(args: argparse.Namespace) -> dict[str, Any]:
    """One long sequence, whose keys and values ranks share."""
    folder = write_config(args.shape, args.work.absolute() / f"{args.shape}-{args.context}")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": args.context + 64}
    (folder / "config.json").write_text(json.dumps(config))
    own = own_options(args) | {"model": str(folder), "max_model_len": args.context + 64, "max_num_seqs": 1}
    return compare(args, {"ranks": {"context_parallel_size": args.ranks}}, ((1, args.context),), own)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """To one process."""
    others = [name for name in medians if name != "one"]
    return {"ratio" if len(others) == 1 else f"ratio {name}": medians[name] / medians["one"] for name in others}


def balance(args: argparse.Namespace) -> dict[str, Any]:
    """Whole experts on each rank, tokens by Zipf's law: placed as they lie, by the counts of that, and with copies."""
    found: dict[str, Any] = {}
    file = args.work.absolute() / "expert_load.json"
    file.unlink(missing_ok=True)
    kept = {"tensor_parallel_size": args.ranks, "enable_expert_parallel": True, "expert_load_file": str(file)}
    for name, copies in (("as they lie", 0), ("by counts", 0), (f"{args.copies} copies", args.copies)):
        options = own_options(args) | kept | {"threads": 1, "num_redundant_experts": copies}
        with closing(start_engine(flat_config(**options))) as engine:
            rates = []
            for turn in range(args.rounds):
                asked = requests_of(args, 16, 64, 32, turn)
                rates.append(rate(engine, [favourites(request, args.shape) for request in asked]))
            stats = engine.stats()
            prefill, decode = (statistics.median(each.rate for each in phase) for phase in zip(*rates, strict=True))
            found[name] = {"most over mean": stats.expert_imbalance, "pairs": stats.expert_pairs,
                           "weight bytes": engine.model.weight_bytes, "prefill": prefill, "decode": decode}  # fmt: skip
    return found


def favourites(request: Request, shape: str) -> Request:
    """The request with tokens of which the i-th is asked for 1 / i as often as the first."""
    rng, size = random.Random(request.id), SHAPES[shape]["vocab_size"] - 16
    weights = list(accumulate(1 / (i + 1) for i in range(size)))
    return replace(request, prompt=tuple(rng.choices(range(16, size + 16), cum_weights=weights, k=len(request.prompt))))


WORK = {
    "exchange": exchange,
    "steps": steps,
    "rows": rows,
    "runs": runs,
    "stages": stages,
    "experts": experts,
    "balance": balance,
    "context": context,
}


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=16_384, help="tokens of the long sequence")
    parser.add_argument("--micro-batches", type=int, default=0)
    parser.add_argument("--layers", default="auto")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    measure(WORK, parser.parse_args(), "ranks")


if __name__ == "__main__":
    main()
