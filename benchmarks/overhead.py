"""What a decode step costs beside the native kernels: Python, scheduling, filling arrays, reading results.

    python benchmarks/overhead.py --shape llama-1b --quantization int4 --batch 1 32
    python benchmarks/overhead.py --batch 16 --adapters 0 1 8

Every call into the native extension is timed; the rest of the step is the overhead. Bars: 3 % at 1, 5 % at 32.
With `--adapters` the rows of a batch take turns with that many LoRA adapters of rank 16 on every matrix (0: with none).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import MATRICES, SHAPES, shape_of, write_config

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--adapters", type=int, nargs="+", help="LoRA adapters in a batch")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
