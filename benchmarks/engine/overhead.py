"""Overhead of a decode step beside the native kernels: Python, scheduling, filling arrays, reading results.

    python -m benchmarks.engine.overhead steps --shape llama-1b --quantization int4 --batch 1 32
    python -m benchmarks.engine.overhead steps --batch 16 --adapters 0 1 8
    python -m benchmarks.engine.overhead calls [MODEL]

`steps`: every call into the native extension is timed; the rest of the step is the overhead. Bars: 3 % at 1, 5 % at 32.
With `--adapters` the rows of a batch take turns with that many LoRA adapters of rank 16 on every matrix (0: with none).
`calls` prints the files of quire that a request passes from `LLM.generate` to the native call, in the order in which
they are first entered, and the Python calls of a step that decodes one sequence (median over the steps), by file.
"""

from __future__ import annotations

import argparse
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
from safetensors.torch import save_file

import quire
from quire import LLM
from quire.bench.suite.foreign.shapes import MATRICES, SHAPES, shape_of, write_config
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine

RANK = 16


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


def decode(
    engine: Engine, clock: Timed, batch: int, context: int, steps: int, adapters: int = 0
) -> tuple[float, float]:
    """(median step, median overhead of a step) in seconds."""
    for i in range(batch):
        prompt = tuple((j * 7919 + i) % 31000 + 5 for j in range(context))
        params = SamplingParams(max_tokens=steps + 16, temperature=0.0, ignore_eos=True)
        adapter = f"a{i % adapters}" if adapters else ""
        name = f"{batch}-{adapters}-{i}"
        engine.submit(Request(id=name, prompt=prompt, params=params, seed=0, arrival=0.0, adapter=adapter))
    while sum(len(s.tokens) > s.prompt_len + 2 for s in engine.scheduler.running) < batch:
        engine.step()
    whole, rest = [], []
    for _ in range(steps):
        clock.seconds, started = 0.0, time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)
        rest.append(whole[-1] - clock.seconds)
    while engine.has_work:
        engine.step()
    return statistics.median(whole), statistics.median(rest)


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


def steps(args: argparse.Namespace) -> None:
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
        step, rest = decode(engine, clock, batch, 128, args.steps, adapters)
        beside = f", {adapters} adapters" if args.adapters else ""
        print(f"batch {batch:3d}{beside}: step {step * 1e3:7.2f} ms, {batch / step:6.1f} tokens/s, "
              f"outside the kernels {rest * 1e6:6.0f} us = {rest / step:.2%}")  # fmt: skip


def main() -> None:
    """Measure and print."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="{steps,calls}")
    one = parts.add_parser("steps", help="milliseconds of a step, and those outside the kernels")
    one.add_argument("--shape", choices=SHAPES, default="llama-1b")
    one.add_argument("--quantization", default="int4")
    one.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    one.add_argument("--steps", type=int, default=48)
    one.add_argument("--adapters", type=int, nargs="+", help="LoRA adapters in a batch")
    one.set_defaults(run=steps)
    other = parts.add_parser("calls", help="files that a token passes, and Python calls of a step")
    other.add_argument("model", nargs="?", default="", metavar="MODEL")
    other.set_defaults(run=calls)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
