"""Tables of what was measured on SmolLM2-135M: its formats, its compressions and its draft heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TEXTS = ("prose", "code", "dialogue")
AT_LOAD = {
    "bf16": ("bf16", "llama.cpp bf16"),
    "bf16, 12 bits": ("bf16 in 12 bits", "llama.cpp bf16"),
    "f16": ("f16", "llama.cpp f16"),
    "int8 g32": ("int8, groups of 32", "llama.cpp q8_0"),
    "int8 g32 a16": ("int8, groups of 32, 16-bit activations", "llama.cpp q8_0"),
    "int4 g32": ("int4, groups of 32", "llama.cpp q4_0"),
    "int4 g32 a16": ("int4, groups of 32, 16-bit activations", "llama.cpp q4_0"),
    "nf4 g32": ("nf4, groups of 32", "llama.cpp iq4_nl"),
    "nf4 g32 a16": ("nf4, groups of 32, 16-bit activations", "llama.cpp iq4_nl"),
    "mxfp4 g32": ("mxfp4", "llama.cpp mxfp4"),
}
"""Format of ours -> how it is called, and that of llama.cpp with as many bits."""
CACHES = {
    "f32, bfloat16 KV": ("bfloat16", "bf16"),
    "f32, float16 KV": ("float16", "f16"),
    "f32, int8 KV": ("int8", "q8_0"),
    "f32, fp8 KV": ("fp8", "q8_0"),
}
METHODS = {
    "rtn4": "RTN int4, groups of 64",
    "gptq4_g64": "GPTQ int4, groups of 64",
    "gptq4_g32": "GPTQ int4, groups of 32",
    "awq4": "AWQ int4, groups of 64",
    "nf4": "NF4, blocks of 64",
    "sparsegpt": "SparseGPT 2:4",
    "sparsegpt_recovered": "SparseGPT 2:4, then 60 steps of training",
}
TOOLS = {"llmcompressor": "llm-compressor", "gptqmodel": "GPTQModel", "bitsandbytes": "bitsandbytes"}
DRAFTS = {
    "ngram": "`ngram`, no training",
    "suffix": "`suffix`, no training",
    "self, 15 layers": "`self`, the first 15 of 30 layers",
    "medusa": "Medusa, four heads",
    "eagle3": "EAGLE-3, chain of 4 tokens",
    "eagle3, tree of 16": "EAGLE-3, tree of 16 tokens",
}


def _results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _formats() -> dict[str, dict[str, Any]]:
    return {r["format"]: r for r in _results("quality.json")["rows"] if r["model"] == "smollm2" and "kl" in r}


def _pairs(head: str, pairs: dict[str, tuple[str, str, str]]) -> str:
    """Table of `pairs`: format of ours -> how both are called, and that of theirs."""
    found = _formats()
    lines = [f"| {head} | llama.cpp | {' | '.join(TEXTS)} | all |", "|---" * (3 + len(TEXTS)) + "|"]
    for ours, (name, their_name, theirs) in pairs.items():
        if ours not in found or theirs not in found:
            continue
        a, b = found[ours], found[theirs]
        cells = [f"{a['texts'][t]['kl']:.2g} / {b['texts'][t]['kl']:.2g}" for t in TEXTS]
        lines.append(f"| {name} | {their_name} | {' | '.join(cells)} | {a['kl'] / b['kl']:.2f} |")
    return "\n".join(lines)


def at_load() -> str:
    """KL divergence of formats that are made at load beside files of llama.cpp with as many bits."""
    pairs = {ours: (name, theirs.split()[1].upper(), theirs) for ours, (name, theirs) in AT_LOAD.items()}
    return _pairs("quire", pairs)


def same_files() -> str:
    """KL divergence of the same files, and of those that `quire compress` writes, in both engines."""
    files = [name.removeprefix("quire ") for name in _formats() if name.startswith("quire ")]
    pairs = {
        f"quire {n}": (n.upper(), "the same file", f"llama.cpp {n}") for n in files if not n.startswith("compress")
    }
    return _pairs("file of llama-quantize, in quire", pairs)


def written() -> str:
    """KL divergence of files that `quire compress` writes beside those of llama-quantize, each in its engine."""
    mixed = {"Q4_K": "q4_k_s", "Q5_K": "q5_k_s", "Q3_K": "q3_k_s", "Q2_K": "q2_k", "Q6_K": "q6_k"}
    names = [name.removeprefix("quire compress ") for name in _formats() if name.startswith("quire compress ")]
    pairs = {}
    for name in names:
        theirs = mixed.get(name, name.lower())
        pairs[f"quire compress {name}"] = (name, theirs.upper(), f"quire {theirs}")
    return _pairs("file of `quire compress`", pairs).replace("| llama.cpp |", "| file of llama-quantize |", 1)


def caches() -> str:
    """KL divergence of formats of keys and values."""
    return _pairs("KV cache of quire", {o: (n, t.upper(), f"llama.cpp f32, {t} KV") for o, (n, t) in CACHES.items()})


def compressions() -> str:
    """KL divergence of compressions beside those of other tools."""
    rows = {(r["method"], r["tool"]): r for r in _results("compressors.json") if r["model"] == "smollm2" and "kl" in r}
    lines = ["| method | KL, quire | same top token, quire | other tool | KL, other | ratio |", "|---" * 6 + "|"]
    for method, name in METHODS.items():
        ours = rows.get((method, "quire"))
        if ours is None:
            continue
        begin = f"| {name} | {ours['kl']:.4f} | {100 * ours['top1']:.1f} % |"
        others = [(shown, rows[method, tool]) for tool, shown in TOOLS.items() if (method, tool) in rows]
        lines += [f"{begin} {tool} | {r['kl']:.4f} | {ours['kl'] / r['kl']:.2f} |" for tool, r in others]
        lines += [] if others else [f"{begin} | | |"]
    return "\n".join(lines)


def drafts() -> str:
    """Tokens a step of draft methods on held-out dialogue."""
    found = _results("trained_drafts.json")
    lines = [
        "| draft method | trained on | tokens per step, greedy | tokens per step, temperature 0.8 |",
        "|---" * 4 + "|",
    ]
    for key, name in DRAFTS.items():
        if key in found:
            row = found[key]
            trained = f"{row['trained_tokens']:,} tokens" if "trained_tokens" in row else ""
            greedy, drawn = (row[f"temperature {t}"]["tokens_per_step"] for t in ("0.0", "0.8"))
            lines.append(f"| {name} | {trained} | {greedy:.2f} | {drawn:.2f} |")
    return "\n".join(lines)
