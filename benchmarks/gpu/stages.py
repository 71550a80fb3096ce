"""Measurements of `check.py`, one per process: each prints its figures as lines of JSON as soon as it has them.

Without `--dry` they need a GPU. With it they run the same lines on tiny shapes under Triton's interpreter: the figures
mean nothing then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.tune import Scale, missing, seconds, tell, tune
from quire.bench.suite.foreign.shapes import write_config
from quire.core.config import EngineConfig, flat_config
from quire.core.dtypes import BF16
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.layout import PlainLayout
from quire.ops.triton.backend import GpuOps
from quire.ops.triton.gpu import open_gpu

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))


def config_of(scale: Scale, **options: Any) -> EngineConfig:
    """Options of an engine on the GPU; without one, few graphs: each runs every kernel as Python once."""
    small = {"max_num_batched_tokens": 2, "max_num_seqs": 2} if scale.dry else {}
    return flat_config(**({"device": "cuda", "ops": missing()} | options | small))


def copy_rate(scale: Scale, device: torch.device) -> float:
    """Bytes/s of a copy within the device, read and written."""
    source = torch.zeros(scale(4 << 30, 1 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 10)


def matmul_rate(scale: Scale, device: torch.device) -> float:
    """Operations/s of a large bf16 product by torch."""
    n = scale(8192, 64)
    a, b = (torch.randn((n, n), device=device).bfloat16() for _ in range(2))
    return 2.0 * n**3 / seconds(lambda: a @ b, 20)


def limits(scale: Scale) -> None:
    """What the machine can do."""
    device = open_gpu().device
    tell(device=torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter", torch=torch.__version__)
    tell(copy_gb_per_s=copy_rate(scale, device) / 1e9, bf16_tflop_per_s=matmul_rate(scale, device) / 1e12)


def greedy(config: EngineConfig, prompts: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """The tokens an engine gives, in one batch."""
    engine = start_engine(config)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=str(i), prompt=prompt, params=params, seed=0, arrival=0.0))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for out in engine.step():
            found[int(out.request_id)] += out.tokens
    return found


def tokens(scale: Scale) -> None:
    """The embedded model in f32 gives the same greedy tokens as on the CPU backend."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(16, 500) for _ in range(rng.randint(3, scale(90, 3)))) for _ in range(scale(24, 1))]
    options = {"dtype": "float32", "num_blocks": 512, "max_model_len": 256}
    theirs = greedy(flat_config(device="cpu", **options), prompts, scale(48, 2))
    ours = greedy(config_of(scale, **options), prompts, scale(48, 2))
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    tell(requests=len(prompts), equal_to_cpu=equal)
    if equal < len(prompts):
        first = next(i for i in range(len(prompts)) if ours[i] != theirs[i])
        sys.exit(f"request {first}: {ours[first]} on the GPU, {theirs[first]} on the CPU")


def bits(scale: Scale) -> None:
    """Tokens and log-probabilities are the same bits alone, in a batch, in any chunking, from graphs or op by op."""
    from test_bit_equality import make_requests, run  # type: ignore[import-not-found]

    from quire.engine.local import LocalEngine

    options: dict[str, Any] = {"num_blocks": 512, "max_model_len": 256}
    whole = LocalEngine(config_of(scale, **options))
    requests = make_requests(scale(24, 2), whole.info.vocab_size)
    if scale.dry:
        change = msgspec.structs.replace
        requests = [change(r, prompt=r.prompt[:4], params=change(r.params, max_tokens=2)) for r in requests]
    expected = {name: a.bits() for name, a in run(whole, requests).items()}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "alone": lambda: {r.id: run(whole, [r])[r.id] for r in requests},
        "trickling": lambda: run(whole, requests, random.Random(1)),
        "chunks": lambda: run(
            LocalEngine(config_of(scale, max_num_batched_tokens=16, max_num_seqs=7, **options)), requests
        ),
        "eager": lambda: run(LocalEngine(config_of(scale, enforce_eager=True, **options)), requests),
        "not_ahead": lambda: run(LocalEngine(config_of(scale, async_scheduling=False, **options)), requests),
    }
    wrong = []
    for way, go in ways.items():
        found = {name: a.bits() for name, a in go().items()}
        differing = [name for name in expected if found[name] != expected[name]]
        tell(**{f"differing_{way}": len(differing)})
        wrong += [f"{way}: {', '.join(differing[:5])}"] if differing else []
    if wrong:
        sys.exit("; ".join(wrong))


def attention(scale: Scale) -> None:
    """Prefill of 8k tokens and decode of 64 sequences of 4k, beside torch's flash attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from op_cases.reference import attention_case
    from quire.ops.attention_spec import AttentionSpec

    gpu = open_gpu()
    ops = GpuOps(gpu, missing())
    heads, kv_heads, d = scale(32, 4), scale(8, 2), scale(128, 16)
    problems = {"prefill": ((scale(8192, 32),) * 2,), "decode": ((1, scale(4096, 40)),) * scale(64, 2)}
    for name, rows in problems.items():
        layout = PlainLayout(16, kv_heads, d, BF16)
        case = attention_case(torch.Generator(), layout, heads, rows, garbage=False)
        cache = type(case["cache"])(layout, *(t.to(gpu.device) for t in (case["cache"].keys, case["cache"].values)))
        args = {k: v.to(gpu.device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        args |= {"cache": cache, "qkv": args["qkv"].bfloat16(), "spec": AttentionSpec(d**-0.5)}
        ours = seconds(lambda args=args: ops.attention(**args), 20)  # type: ignore[misc]
        batch, (new, context) = len(rows), rows[0]
        q, k, v = (torch.randn((batch, h, t, d), device=gpu.device).bfloat16()
                   for h, t in ((heads, new), (kv_heads, context), (kv_heads, context)))  # fmt: skip
        with sdpa_kernel([SDPBackend.MATH if scale.dry else SDPBackend.FLASH_ATTENTION]):
            theirs = seconds(lambda: sdpa(q, k, v, is_causal=new > 1, enable_gqa=True), 20)  # noqa: B023
        tell(**{f"{name}_us": ours * 1e6, f"{name}_sdpa_flash_us": theirs * 1e6, f"{name}_speedup": theirs / ours})


class Loaded:
    """An engine of made-up weights, and how fast it runs."""

    def __init__(self, shape: str, quantization: str, scale: Scale) -> None:
        self.scale, self.count = scale, 0
        options: dict[str, Any] = {
            "load_format": "dummy", "dtype": "bfloat16", "enable_prefix_caching": False,
            "quantization": None if quantization == "none" else quantization, "group_size": scale(128, 32),
            "max_model_len": scale(8320, 128), "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = write_config("micro" if scale.dry else shape, Path(folder))
            started = time.perf_counter()
            self.engine = start_engine(config_of(scale, model=str(path), **options))
        model = self.engine.model
        self.read = model.weight_bytes - model.report["rope"][1] - model.report["embed"][1]
        tell(load_s=time.perf_counter() - started, weight_gb=model.weight_bytes / 1e9, without_kernel=list(missing()))
        tell(kv_blocks=self.engine.pool.num_blocks, graph_sizes=len(self.engine.runner.step.graph_sizes))

    def submit(self, count: int, prompt: int, answer: int) -> None:
        """`count` requests of made-up tokens."""
        vocabulary = self.engine.model.spec.vocab_size
        for _ in range(count):
            self.count += 1
            ids = tuple((j * 7919 + self.count * 31) % (vocabulary - 8) + 5 for j in range(prompt))
            params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            self.engine.submit(Request(id=str(self.count), prompt=ids, params=params, seed=0, arrival=0.0))

    def decode_step(self, batch: int, context: int, steps: int) -> float:
        """Median seconds of a decode step, on the host's clock."""
        # Without a GPU a step has two rows: the first sequence must not end before the last one's prompt is read.
        self.submit(batch, context, steps + self.scale(8, 8 + batch * context))
        running = self.engine.scheduler.running
        while len(running) < batch or any(len(s.tokens) < s.prompt_len + 2 for s in running):
            if not self.engine.has_work:
                raise RuntimeError(f"{batch} requests of {context} tokens never decode together")
            self.engine.step()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - started)
        while self.engine.has_work:
            self.engine.step()
        return statistics.median(times)

    def until_done(self) -> float:
        """Seconds for all that is submitted."""
        started = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - started


def model(scale: Scale, shape: str, quantization: str) -> None:
    """Decode and prefill against the machine's limits, throughput, the host's part of a step."""
    loaded = Loaded(shape, quantization, scale)
    engine, spec = loaded.engine, loaded.engine.model.spec
    context = scale(128, 8)
    step = loaded.decode_step(1, context, scale(100, 2))
    nbytes = loaded.read + context * engine.memory_plan.bytes_per_token
    copies, products = copy_rate(scale, engine.ops.gpu.device), matmul_rate(scale, engine.ops.gpu.device)
    tell(decode_tokens_per_s=1 / step, decode_share_of_copy_rate=nbytes / step / copies)
    length = scale(8191, 15)
    loaded.submit(1, length, 1)
    loaded.until_done()
    loaded.submit(1, length, 1)
    took = loaded.until_done()
    per_layer = spec.hidden * (2 * spec.head_dim * (spec.heads + spec.kv_heads) + 3 * spec.intermediate)
    work = 2.0 * length * spec.layers * per_layer + 2.0 * spec.layers * spec.heads * spec.head_dim * length**2
    tell(prefill_tokens_per_s=length / took, prefill_share_of_bf16_rate=work / took / products)
    batch = scale(64, 2)
    step = loaded.decode_step(batch, context, scale(50, 2))
    engine.ahead = False
    waiting = loaded.decode_step(batch, context, scale(50, 2))
    engine.ahead = True
    size = min(s for s in engine.runner.step.graph_sizes if s >= batch)
    graph = engine.runner.step.recorded[size, size]
    busy = seconds(graph.run, 20)
    tell(step_ms_at_64=step * 1e3, graph_ms_at_64=busy * 1e3, outside_graph_share_at_64=1 - busy / step)
    tell(step_ms_at_64_not_ahead=waiting * 1e3, outside_graph_share_at_64_not_ahead=1 - busy / waiting)
    for requests in (1, 16, 64, 256) if not scale.dry else (1, 2):
        loaded.submit(requests, scale(512, 6), scale(128, 2))
        took = loaded.until_done()
        tell(**{f"tokens_per_s_at_{requests}": requests * scale(512 + 128, 8) / took})


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["limits", "tokens", "bits", "attention", "model", "tune"])
    parser.add_argument("options", nargs="*")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stages: dict[str, Callable[..., None]] = {"limits": limits, "tokens": tokens, "bits": bits, "attention": attention,
                                              "model": model, "tune": tune}  # fmt: skip
    stages[args.stage](Scale(args.dry), *args.options)


if __name__ == "__main__":
    main()
