"""quire beside Hugging Face generate on one machine and one model: random weights of a real shape, bf16, mixed lengths.

    python benchmarks/hf_generate.py --shape llama-1b --requests 32

Both get the same prompts and output lengths. Hugging Face runs static batches (left-padded, every row runs until the
longest output of its batch is done); tokens/s counts useful output tokens only. Runs are interleaved, medians reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import shapes
import torch
from shapes import SHAPES
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine

Job = tuple[tuple[int, ...], int]


def workload(requests: int, seed: int) -> list[Job]:
    """(prompt, output length) pairs: prompts of 32 to 256 tokens, outputs of 16 to 128."""
    rng = random.Random(seed)
    return [
        (tuple(rng.randrange(5, 32000) for _ in range(rng.randint(32, 256))), rng.randint(16, 128))
        for _ in range(requests)
    ]


def checkpoint(shape: str, folder: Path) -> PreTrainedModel:
    """A random checkpoint of the shape in `folder`, as the module that generate runs."""
    shapes.write_checkpoint(shape, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def run_hf(model: PreTrainedModel, jobs: list[Job], batch: int) -> float:
    """Seconds for all jobs in static batches of `batch`."""
    started = time.perf_counter()
    for at in range(0, len(jobs), batch):
        part = jobs[at : at + batch]
        width = max(len(p) for p, _ in part)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p, _ in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
        longest = max(n for _, n in part)
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest,
                       do_sample=False, pad_token_id=0, eos_token_id=None)  # fmt: skip
    return time.perf_counter() - started


def run_quire(engine: LocalEngine, jobs: list[Job]) -> tuple[float, float]:
    """Seconds for all jobs submitted at once, and the largest KV waste seen."""
    started = time.perf_counter()
    for i, (prompt, length) in enumerate(jobs):
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=f"{started}-{i}", prompt=prompt, params=params, seed=0, arrival=time.monotonic()))
    waste = [0.0]
    while (report := engine.poll(0)) is not None:
        waste.append(report.stats.waste)
    return time.perf_counter() - started, max(waste)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(args.shape, Path(folder))
        engine = LocalEngine(
            flat_config(
                model=folder,
                quantization=args.quantization,
                enable_prefix_caching=False,
                max_model_len=1024,
                cache_packed="off",
            )
        )
    torch.set_num_threads(engine.info.threads)
    rows = []
    for count in args.requests:
        jobs = workload(count, seed=count)
        useful = sum(n for _, n in jobs)
        times: dict[str, list[float]] = {"hf": [], "quire": []}
        run_quire(engine, jobs[:1])
        for _ in range(args.repeats):
            times["quire"].append(run_quire(engine, jobs)[0])
            times["hf"].append(run_hf(model, jobs, batch=count))
        rates = {k: useful / statistics.median(v) for k, v in times.items()}
        rows.append({"requests": count, "output_tokens": useful, **rates, "ratio": rates["quire"] / rates["hf"]})
        print(f"{args.shape} {count:3d} requests: quire {rates['quire']:.1f} tok/s, Hugging Face generate "
              f"{rates['hf']:.1f} tok/s, ratio {rates['quire'] / rates['hf']:.2f}", flush=True)  # fmt: skip
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"shape": args.shape, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
