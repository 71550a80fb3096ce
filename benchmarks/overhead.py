"""What a decode step costs beside the native kernels: Python, scheduling, filling arrays, reading results.

    python benchmarks/overhead.py --shape llama-1b --quantization int4 --batch 1 32

Every call into the native extension is timed; the rest of the step is the overhead. Bars: 3 % at 1, 5 % at 32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_config

from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine


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


def decode(engine: Engine, clock: Timed, batch: int, context: int, steps: int) -> tuple[float, float]:
    """(median step, median overhead of a step) in seconds."""
    for i in range(batch):
        prompt = tuple((j * 7919 + i) % 31000 + 5 for j in range(context))
        params = SamplingParams(max_tokens=steps + 16, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=f"{batch}-{i}", prompt=prompt, params=params, seed=0, arrival=0.0))
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(args.shape, Path(folder)))
        options = {"quantization": args.quantization, "max_model_len": 1024, "max_num_seqs": max(args.batch)}
        engine = Engine(flat_config(model=model, load_format="dummy", enable_prefix_caching=False, **options))
    assert engine.ops.cpu is not None
    clock = Timed(engine.ops.cpu.native.module)
    engine.ops.cpu.native.module = clock  # type: ignore[assignment]
    engine.runner._graphs.clear()  # a first start has recorded steps already, without the clock
    for batch in args.batch:
        step, rest = decode(engine, clock, batch, 128, args.steps)
        print(
            f"batch {batch:3d}: step {step * 1e3:7.2f} ms, outside the kernels {rest * 1e6:6.0f} us = {rest / step:.2%}"
        )


if __name__ == "__main__":
    main()
