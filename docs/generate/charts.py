"""Draw the charts of docs/images/charts from benchmarks/results, as SVG that reads well in light and dark mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from quire.figures.chart import Bar, chart

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "images" / "charts"


@lru_cache
def results(name: str) -> Any:
    """Return what a file of results holds; a list of rows for JSON lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def pair(technique: str, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of a technique off and on."""
    rows = [
        row for row in results("techniques.jsonl") if (row["technique"], row["model"]["name"]) == (technique, model)
    ]
    off, on = sorted(rows, key=lambda row: bool(row["on"]))
    return off, on


def batching() -> str:
    """Throughput with one improvement after the other."""
    rows = {name: pair(name, "qwen-0.6b") for name in ("paged-kv", "continuous-batching")}
    rate = "output_tokens_per_s"
    shown = (
        ("memory reserved for the longest context", rows["paged-kv"][0], False),
        ("paged memory, static batch", rows["continuous-batching"][0], False),
        ("paged memory, continuous batching", rows["continuous-batching"][1], True),
    )
    bars = [
        Bar(label, row["metrics"][rate], f"{row['metrics'][rate]:.0f} tokens/s", strong) for label, row, strong in shown
    ]
    return chart(
        "Throughput of 16 requests of different lengths", "qwen-0.6b, int8, at most 8 at a time; techniques.jsonl", bars
    )


def kv_store() -> str:
    """Time to the first token behind a long prefix."""
    found = results("kv_store.json")["ttft"]["median_s"]
    shown = (
        ("compute the prefix", "computed"),
        ("read it, files not in memory", "stored cold"),
        ("read it", "stored warm"),
    )
    bars = [Bar(label, found[key], f"{found[key]:.2f} s", key != "computed") for label, key in shown]
    return chart("Time to the first token behind a prefix of 4,000 tokens", "KV store on disk; kv_store.json", bars)


def kv_quality() -> str:
    """Loss of quality by the format of keys and values."""
    rows = {row["format"]: row for row in results("quality.json")["rows"] if row["model"] == "pydoc" and "kl" in row}
    bars = [
        Bar(
            f"{name} KV cache",
            rows[f"f32, {name} KV"]["kl"],
            f"{rows[f'f32, {name} KV']['kl']:.5f}",
            name != "bfloat16",
        )
        for name in ("bfloat16", "int8", "fp8")
    ]
    return chart("KL divergence from an f32 KV cache, nats a token", "bundled model, f32 weights; quality.json", bars)


def speculation() -> str:
    """Speed of each draft method compared with plain decoding."""
    found = results("speculation.json")
    heads = found["heads eagle3"]
    shown = (
        ("draft model, int8 target, 0.8 a token", found["chain"]["ratio"], found["chain"]["tokens_per_step"]),
        ("own int4 weights, bf16 target", found["self"]["ratio"], found["self"]["tokens_per_step"]),
        ("prompt lookup, repeated questions", found["lookup"]["ratio"], found["lookup"]["tokens_per_step"]),
        (
            "EAGLE-3, chain of 4, tiny target",
            heads["chain of 4"]["speed_beside_plain"],
            heads["chain of 4"]["tokens_per_step"],
        ),
    )
    bars = [Bar(label, ratio, f"{ratio:.2f} x ({steps:.1f} tokens a step)", True) for label, ratio, steps in shown]
    return chart(
        "Speed compared with plain decoding, one sequence", "speculation.json", [Bar("plain decoding", 1, "1 x"), *bars]
    )


def quantization() -> str:
    """Decode speed of one sequence by weight format."""
    wanted = {"bf16": "bf16", "bf12": "bf16 in 12 bits", "int8": "int8", "int4": "int4"}
    rates: dict[str, float] = {}
    for row in results("peers_zen5.json")["rows"]:
        options = row["options"]
        name = options.get("quantization") or ("bf12" if options.get("bf16_bits") == 12 else "bf16")
        group = options.get("group_size", 32)
        if (row["shape"], row["peer"], row["measure"], group) == ("llama-1b", "llama.cpp", "decode x1", 32):
            rates[name] = row["quire_rate"]
    bars = [Bar(label, rates[name], f"{rates[name]:.1f} tokens/s", name != "bf16") for name, label in wanted.items()]
    return chart("Decode speed of one sequence", "llama-1b, groups of 32, two cores of a Zen 5; peers_zen5.json", bars)


def pruning() -> str:
    """Decode speed of pruned models compared with the dense one."""
    found = results("smaller.json")["sparse"]
    names = {"2:4 bf16": "bf16, 2:4", "2:4 int8": "int8, 2:4", "0.5 int8": "int8, half zeros"}
    bars = [Bar("dense, same format", 1, "1 x")]
    for key, label in names.items():
        bars += [Bar(f"{label}, {n} sequence{'s' * (n > 1)}", found[key][f"decode of {n}"]["ratio"],
                     f"{found[key][f'decode of {n}']['ratio']:.2f} x", n == 1) for n in (1, 16)]  # fmt: skip
    return chart(
        "Decode speed of pruned models compared with dense", "llama-1b, two cores of a Zen 4; smaller.json", bars
    )


def parallelism() -> str:
    """What dividing one machine's work costs."""
    found = results("ranks.json")
    kinds = {"steps": "tensor", "stages": "pipeline", "context": "context"}
    bars = [Bar("one process, two threads", 1, "1 x")]
    for key, label in kinds.items():
        for step in ("prefill of 1", "decode of 1"):
            ratio = found[key][step]["ratio"]
            bars.append(Bar(f"{label}, {step.partition(' ')[0]}", ratio, f"{ratio:.2f} x", step.startswith("decode")))
    return chart("Two ranks on the same two cores compared with one process", "llama-1b, int8; ranks.json", bars)


def offload() -> str:
    """Decode speed with half of the weights on disk."""
    found = results("offload.json")["disk"]
    bars = [
        Bar("all weights in memory", found["tokens/s in memory"], f"{found['tokens/s in memory']:.1f} tokens/s"),
        Bar("half of the weights on disk", found["tokens/s"], f"{found['tokens/s']:.1f} tokens/s", strong=True),
    ]
    return chart("Decode speed with half of the weights on disk", "llama-1b, bf16; offload.json", bars)


def techniques() -> str:
    """Gain of each technique."""
    shown = {
        "kv-cache": ("KV cache", "output_tokens_per_s"),
        "paged-kv": ("paged KV cache", "output_tokens_per_s"),
        "continuous-batching": ("continuous batching", "output_tokens_per_s"),
        "prefix-cache": ("prefix cache", "output_tokens_per_s"),
        "fusion": ("fusion", "output_tokens_per_s"),
        "capture": ("captured steps", "decode_tokens_per_s"),
        "ngram": ("prompt lookup", "decode_tokens_per_s"),
        "int8-weights": ("int8 weights", "output_tokens_per_s"),
        "int4-weights": ("int4 weights", "output_tokens_per_s"),
    }
    bars = []
    for key, (label, metric) in shown.items():
        off, on = pair(key, "qwen-0.6b")
        ratio = median(b / a for a, b in zip(off["samples"][metric], on["samples"][metric], strict=True))
        bars.append(Bar(label, ratio, f"{ratio:.2f} x", strong=True))
    return chart(
        "Speed with a technique compared with the same without it",
        "qwen-0.6b, two cores of a Xeon with AMX; techniques.jsonl",
        bars,
    )


ALL: dict[str, Callable[[], str]] = {
    "batching": batching,
    "kv-store": kv_store,
    "kv-quality": kv_quality,
    "speculation": speculation,
    "quantization": quantization,
    "pruning": pruning,
    "parallelism": parallelism,
    "offload": offload,
    "techniques": techniques,
}


def write() -> list[Path]:
    """Write the charts that are old; return their paths."""
    CHARTS.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in ALL.items():
        path, text = CHARTS / f"{name}.svg", draw()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
