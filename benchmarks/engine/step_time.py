"""Where the time of a step goes: overhead beside the kernels, Python calls, and each op beside the machine's limits.

    python -m benchmarks.engine.step_time overhead --shape llama-1b --quantization int4 --batch 1 32
    python -m benchmarks.engine.step_time overhead --batch 16 --adapters 0 1 8
    python -m benchmarks.engine.step_time calls [MODEL]
    python -m benchmarks.engine.step_time profile --shape qwen-0.6b --quantization none --prompt 512
    python -m benchmarks.engine.step_time profile --quantization int4 --group-size 32 --batch 1

`overhead`: every call into the native extension is timed; the rest of a decode step is Python, scheduling, filling
arrays and reading results. Bars: 3 % at 1, 5 % at 32. With `--adapters` the rows of a batch take turns with that many
LoRA adapters of rank 16 on every matrix (0: with none).
`calls` prints the files of quire that a request passes from `LLM.generate` to the native call, in the order in which
they are first entered, and the Python calls of a step that decodes one sequence (median over the steps), by file.
`profile`: ops of a prompt, or of a decode step of `--batch` sequences, run one by one (`enforce_eager`) under a clock.
Of products and attention the operations (a multiply-add is two) and the bytes of weights, keys and values are counted
from their sizes; `at best` is the time that these would take at the peak of their unit or at the best read rate,
whichever is longer, both measured right after the run (as `kernels/cpu_ops.py` does).
Weights are random.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import quire
from benchmarks.common.results import parser_of
from benchmarks.kernels.cpu_ops import Bench, Limits
from quire import LLM
from quire.bench.suite.foreign.shapes import MATRICES, SHAPES, shape_of, write_config
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.ops.cpu.matrix import GROWING, CpuMatrix
from quire.ops.facts import LANES
from quire.ops.kinds import KINDS

RANK = 16
CONTEXT = 128
"""Tokens of each sequence that decodes."""


def submit(engine: Engine, name: str, length: int, tokens: int, adapter: str = "") -> None:
    """Queue one request of `length` arbitrary tokens."""
    prompt = tuple((i * 7919 + len(name) + sum(map(ord, name))) % 31000 + 5 for i in range(length))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id=name, prompt=prompt, params=params, seed=0, arrival=0.0, adapter=adapter))


def begin(engine: Engine, batch: int, steps: int, adapters: int = 0) -> None:
    """Have `batch` sequences computed up to their first tokens, with room for `steps` steps."""
    for i in range(batch):
        adapter = f"a{i % adapters}" if adapters else ""
        submit(engine, f"{batch} {adapters} {i}", CONTEXT, steps + 16, adapter)
    while sum(len(s.tokens) > s.prompt_len + 2 for s in engine.scheduler.running) < batch:
        engine.step()


def finish(engine: Engine) -> None:
    """Run until nothing is left to do."""
    while engine.has_work:
        engine.step()


# ------------------------------------------------------------------------------------------------------------ overhead


class Timed:
    """The native module with a clock around its calls."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _time(self, fn: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = fn(*args)
        self.seconds += time.perf_counter() - started
        return result

    def call(self, op: int, args: tuple[int | float, ...]) -> None:
        """One op."""
        self._time(self._module.call, op, args)

    def Program(self) -> Any:
        """A recording whose replay is timed."""
        return TimedProgram(self, self._module.Program())


class TimedProgram:
    """A recording with a clock around its replay."""

    def __init__(self, clock: Timed, program: Any) -> None:
        self.add = program.add
        self.run = lambda: clock._time(program.run)


def write_adapters(shape: str, count: int, folder: Path) -> tuple[str, ...]:
    """`count` PEFT folders of random matrices, as --lora-modules names them."""
    c, g, made = SHAPES[shape], torch.Generator().manual_seed(0), []
    for i in range(count):
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(c["num_hidden_layers"]):
            for short, name in MATRICES.items():
                (n, k), base = shape_of(short, c), f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{base}.lora_A.weight"] = torch.randn(RANK, k, generator=g) * 0.01
                tensors[f"{base}.lora_B.weight"] = torch.randn(n, RANK, generator=g) * 0.01
        at = folder / f"adapter-{i}"
        at.mkdir()
        save_file(tensors, at / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        (at / "adapter_config.json").write_text(json.dumps(settings))
        made.append(f"a{i}={at}")
    return tuple(made)


def decode(engine: Engine, clock: Timed, batch: int, steps: int, adapters: int = 0) -> tuple[float, float]:
    """(median step, median overhead of a step) in seconds."""
    begin(engine, batch, steps, adapters)
    whole, rest = [], []
    for _ in range(steps):
        clock.seconds, started = 0.0, time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)
        rest.append(whole[-1] - clock.seconds)
    finish(engine)
    return statistics.median(whole), statistics.median(rest)


def overhead(args: argparse.Namespace) -> None:
    """Time steps of each batch, and print them with their share outside the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(args.shape, Path(folder)))
        options: dict[str, Any] = {"quantization": args.quantization}
        options |= {"max_model_len": 1024, "max_num_seqs": max(args.batch)}
        if args.adapters:
            modules = write_adapters(args.shape, max(args.adapters), Path(folder))
            options |= {"enable_lora": True, "lora_modules": modules, "max_lora_rank": RANK}
        engine = start_engine(flat_config(model=model, load_format="dummy", enable_prefix_caching=False, **options))
    clock = Timed(engine.ops.cpu.native.module)
    engine.ops.cpu.native.module = clock  # type: ignore[assignment]
    engine.runner.step.recorded.clear()  # a first start has recorded steps already, without the clock
    for batch, adapters in itertools.product(args.batch, args.adapters or [0]):
        step, rest = decode(engine, clock, batch, args.steps, adapters)
        beside = f", {adapters} adapters" if args.adapters else ""
        print(f"batch {batch:3d}{beside}: step {step * 1e3:7.2f} ms, {batch / step:6.1f} tokens/s, "
              f"outside the kernels {rest * 1e6:6.0f} us = {rest / step:.2%}")  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- calls

PACKAGE = Path(quire.__file__).parent
TOKENS = 40


class Watch:
    """Counts calls of Python functions: of all, the files; of steps, how many each has."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.steps: list[Counter[str]] = []
        self.within = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As of `sys.setprofile`."""
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path.startswith(str(PACKAGE)):
            name = str(Path(path).relative_to(PACKAGE))
            self.files[name] = self.files.get(name, 0) + 1
        else:
            name = "elsewhere"
        if self.within:
            self.steps[-1][name] += 1


def calls(args: argparse.Namespace) -> None:
    """Watch one answer, after one that was not watched."""
    llm, watch, step = LLM(args.model, device="cpu"), Watch(), Engine.step
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    watch.steps.append(Counter())

    def stepped(self: Engine, *args: Any, **named: Any) -> Any:
        watch.steps.append(Counter())
        watch.within = True
        try:
            return step(self, *args, **named)
        finally:
            watch.within = False

    llm.generate("def f(x):", params)
    Engine.step = stepped  # type: ignore[method-assign]
    sys.setprofile(watch)
    llm.generate("def g(y):", params)
    sys.setprofile(None)
    totals = [sum(each.values()) for each in watch.steps[2:-1]]
    print(f"{len(watch.files)} files, {statistics.median(totals):.0f} Python calls a step of one sequence")
    print("files:", ", ".join(watch.files))
    middle = watch.steps[len(watch.steps) // 2]
    print("calls:", ", ".join(f"{name} {count}" for name, count in middle.most_common()))


# ------------------------------------------------------------------------------------------------------------- profile

REPEATS = 5
NAMES = tuple(KINDS)
PEAK = {"f32": "f32", "bf16": "bf16", "bf12": "bf16", "fp8": "bf16", "int8": "int8", "int4": "int8", "table4": "int8"}


def product(op: str, args: tuple[Any, ...]) -> tuple[str, float, float, str]:
    """A call's name in the table, its operations, the bytes that it must read, and the kind of its numbers.

    Attention is that of one whole prompt, or of rows that each continue a sequence of `CONTEXT` tokens.
    """
    if op in ("gated_mlp", "plain_mlp"):
        first, down = args[2], args[4]
        kind, m, weights = NAMES[first.kind], args[6], (first.n + down.k) * down.n
        return f"{op} {kind} {down.k}x{down.n}", 2.0 * m * weights, bytes_of(first) + bytes_of(down), kind
    if op == "linear":
        w, m = args[2], args[4]
        return f"{op} {NAMES[w.kind]} {w.n}x{w.k}", 2.0 * m * w.n * w.k, bytes_of(w), NAMES[w.kind]
    if op == "attention":
        cache, batch, spec, rows = args[2:6]
        sequences, heads, kv_heads, d = batch.sequences, spec.heads, cache.kv_heads, cache.d
        seen = rows * (rows + 1) / 2 if rows > sequences else rows * CONTEXT
        return op, 4.0 * heads * d * seen, 0.0 if rows > sequences else 4.0 * kv_heads * d * seen, "bf16"
    return op, 0.0, 0.0, "f32"


def bytes_of(w: CpuMatrix) -> float:
    """Bytes of a packed matrix, without those that all of its rows share."""
    return float(-(-w.n // LANES) * sum(getattr(w, step) for step in GROWING.values()))


class Clock:
    """Stands in for `Cpu.call` and adds up seconds, operations and bytes by name."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self.work: dict[str, collections.Counter[tuple[float, float, str]]] = {}

    def __call__(self, op: str, *args: Any) -> None:
        name, *work = product(op, args)
        begin = time.perf_counter()
        self._call(op, *args)
        self.seconds[name] += time.perf_counter() - begin
        self.calls[name] += 1
        self.work.setdefault(name, collections.Counter())[work[0], work[1], str(work[2])] += 1

    def best(self, name: str, limits: Limits) -> float:
        """Seconds of all calls of `name` at the machine's limits."""
        return sum(
            count * max(ops / limits.peak[PEAK[kind]], size / limits.read) / 1e9
            for (ops, size, kind), count in self.work[name].items()
        )


def clocked(engine: Engine, prompt: int, batch: int) -> tuple[Clock, float]:
    """Clocked ops of `REPEATS` prompts, or of as many decode steps of `batch` sequences, and the seconds of all."""
    cpu = engine.ops.cpu
    assert cpu is not None

    def once(name: str) -> None:
        if batch:
            engine.step()
        else:
            submit(engine, name, prompt, 1)
            finish(engine)

    if batch:
        begin(engine, batch, 2 * REPEATS)
    once("warm")
    clock, call = Clock(cpu.call), cpu.call
    cpu.call = clock  # type: ignore[method-assign]
    started = time.perf_counter()
    for turn in range(REPEATS):
        once(f"turn {turn}")
    total = time.perf_counter() - started
    cpu.call = call  # type: ignore[method-assign]
    return clock, total


def show(console: Console, clock: Clock, total: float, limits: Limits) -> None:
    """One row an op, by time, and their sum beside the whole."""
    table = Table(
        title=f"read {limits.read:.1f} GB/s, " + ", ".join(f"{k} {v:.0f} GOP/s" for k, v in limits.peak.items())
    )
    for name in ("op", "calls", "ms", "of all", "at best ms", "of the limit"):
        table.add_column(name, justify="left" if name == "op" else "right", no_wrap=True)
    least = 0.0
    for name, seconds in clock.seconds.most_common():
        best = clock.best(name, limits)
        least += best
        share = (f"{best / REPEATS * 1e3:.2f}", f"{best / seconds:.0%}") if best else ("", "")
        table.add_row(
            name,
            f"{clock.calls[name] / REPEATS:.0f}",
            f"{seconds / REPEATS * 1e3:.2f}",
            f"{seconds / total:.1%}",
            *share,
        )
    rest = total - sum(clock.seconds.values())
    table.add_row("outside the ops", "", f"{rest / REPEATS * 1e3:.2f}", f"{rest / total:.1%}", "", "")
    table.add_row("all", "", f"{total / REPEATS * 1e3:.2f}", "", f"{least / REPEATS * 1e3:.2f}", f"{least / total:.0%}")
    console.print(table)


def profile(args: argparse.Namespace) -> None:
    """Measure and print the table."""
    options = {name: getattr(args, name) for name in ("quantization", "group_size", "bf16_bits", "threads")}
    options |= {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(args.shape, Path(folder)))
        engine = start_engine(flat_config(model=model, load_format="dummy", enable_prefix_caching=False, **options))
        clock, total = clocked(engine, args.prompt, args.batch)
    show(Console(width=110), clock, total, Bench(engine.ops, 0.3, (), ()).limits)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(required=True, metavar="{overhead,calls,profile}")
    one = parts.add_parser("overhead", help="milliseconds of a step, and those outside the kernels")
    one.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    one.add_argument("--steps", type=int, default=48)
    one.add_argument("--adapters", type=int, nargs="+", help="LoRA adapters in a batch")
    one.set_defaults(run=overhead)
    two = parts.add_parser("calls", help="files that a token passes, and Python calls of a step")
    two.add_argument("model", nargs="?", default="", metavar="MODEL")
    two.set_defaults(run=calls)
    three = parts.add_parser("profile", help="each op of a prompt or of a decode step, beside the machine's limits")
    three.add_argument("--group-size", type=int, default=32)
    three.add_argument("--bf16-bits", type=int, default=16)
    three.add_argument("--threads", type=int, default=0, help="threads (0: all cores)")
    three.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    three.add_argument("--batch", type=int, default=0, help="sequences of a decode step, in the place of a prompt")
    three.set_defaults(run=profile)
    for each, quantization in ((one, "int4"), (three, "none")):
        each.add_argument("--shape", choices=SHAPES, default="llama-1b")
        each.add_argument("--quantization", default=quantization)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
