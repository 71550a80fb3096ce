"""Quality of weight formats: KL divergence and top-1 agreement with float32, quire's formats beside llama.cpp's.

    python -m benchmarks.compress.format_quality                                       all models and formats
    python -m benchmarks.compress.format_quality --model pydoc --format "int4 g32" "llama.cpp q4_0"

Models: `pydoc`, the embedded one, on the text it was not trained on (that of `quire eval`); `random`, a Llama of the
width of llama-1b with random weights, --layers deep, on random tokens; `outlier`, the same function with one channel of
each norm's output 300 times larger and the columns that read it 300 times smaller, as trained models have such channels
(Dettmers et al. 2022, LLM.int8(), https://arxiv.org/abs/2208.07339); `smollm2`, SmolLM2-135M-Instruct, on prose, code
and dialogue, a window of 2,048 tokens of each (smollm2.py says what its float32 weights are).

KL(float32 || format) in nats, mean over positions; float32 is quire's, and "llama.cpp f32" shows that both engines
compute the same model. Formats run as they are served: quire's with bf16 embedding, norms and KV cache; llama.cpp's
from files that its own quantizer makes of the same float32 weights, with its f16 KV cache. "f32, X KV": float32 weights
with keys and values in X. MB: weights in memory (an
embedding tied to a quantized head counts twice), or the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common.results import RESULTS, ROOT, parser_of
from benchmarks.compress import smollm2
from quire.bench.quality import heldout_texts
from quire.bench.suite.engines import FOREIGN
from quire.bench.suite.environments import environment
from quire.bench.suite.foreign.shapes import MATRICES, SHAPES, shape_of, write_tokenizer
from quire.bench.suite.process import Command, Process
from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import recipe_of
from quire.core.config import flat_config
from quire.core.errors import QuireError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.ops.arrays import to_torch
from quire.text.tokenizer import Tokenizer

WINDOW = 256
ROWS = 256
"""Positions whose distributions are compared at a time."""
PYDOC = ROOT / "src" / "quire" / "assets" / "pydoc"
MODELS = ["pydoc", "random", "outlier", "smollm2"]
OUTLIER = 300.0
CHANNEL = 100


def loaded_as(quantization: str, group: int, activations: str = "auto") -> dict[str, Any]:
    """Options of weights quantized at load."""
    return {"quantization": quantization, "group_size": group, "activations": activations, "dtype": "bfloat16"}


QUIRE: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, 12 bits": {"dtype": "bfloat16", "bf16_bits": 12},
    "f16": {"dtype": "float16"},
    **{f"int8 g{g}": loaded_as("int8", g) for g in (32, 64, 128)},
    **{f"int4 g{g}": loaded_as("int4", g) for g in (32, 64, 128)},
    **{f"{name} g32": loaded_as(name, 32) for name in ("nf4", "mxfp4")},
    **{f"{name} g32 a16": loaded_as(name, 32, "int16") for name in ("int8", "int4", "nf4")},
    **{
        f"f32, {kind} KV": {"dtype": "float32", "kv_cache_dtype": kind}
        for kind in ("bfloat16", "float16", "int8", "fp8")
    },
}
"""Label -> options; a16: activations rounded to 16 instead of 8 bits."""
GGUF = (
    "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl",
    "iq4_xs", "mxfp4", "nvfp4", "q3_k_l", "q3_k_m", "q3_k_s", "iq3_s", "q2_k",
)  # fmt: skip
"""Formats of files that llama.cpp's quantizer makes."""
FILES = {f"quire {name}": name for name in GGUF}
"""Label -> the file of llama.cpp's quantizer that quire reads as it is."""
WRITTEN = {f"quire compress {name}": name for name in
           ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K")}  # fmt: skip
"""Label -> format of the file that `quire compress --quantize gguf` makes of the same weights, and quire reads."""
LLAMA_CPP = {"llama.cpp f32": None, **{f"llama.cpp {name}": name for name in GGUF}}
LLAMA_CPP_CACHES = {
    f"llama.cpp f32, {kind} KV": kind for kind in ("bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
}
"""Label -> type of its keys and values beside float32 weights."""
FORMATS = [*QUIRE, *FILES, *WRITTEN, *LLAMA_CPP, *LLAMA_CPP_CACHES]


class Spy:
    """Stands in for the sampler and keeps the logits it is given."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.kept = sampler, [torch.empty(0)][:0]

    def __call__(self, logits: Tensor, rows: Any) -> Any:
        """The sampler's answer."""
        self.kept.append(to_torch(logits).clone())
        return self.sampler(logits, rows)


class Run(NamedTuple):
    """Logits [len(window), vocabulary] f32 after every token of each window, and the size of the weights."""

    logits: list[Tensor]
    nbytes: int


def run_quire(model: Path, options: dict[str, Any], windows: list[list[int]]) -> Run:
    """Every window through the whole engine. Raises `QuireError` when the engine refuses the options."""
    longest = max(512, 1 + max(map(len, windows)))
    fixed: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": longest, "cache_packed": "off"}
    engine = LocalEngine(flat_config(model=str(model), **fixed, **options))
    runner: Any = engine.engine.runner
    spy = runner.sampler = Spy(runner.sampler)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    found = []
    for i, window in enumerate(windows):
        spy.kept = []
        engine.submit(Request(id=str(i), prompt=tuple(window), params=params, seed=0, arrival=0.0))
        while engine.poll(0) is not None:
            pass
        found.append(torch.cat(spy.kept).float())
        assert len(found[-1]) == len(window)
    return Run(found, engine.info.weight_bytes)


def gguf_file(work: Path, folder: Path, fmt: str | None) -> Path:
    """A file made from the float32 weights in `folder`, by llama.cpp's quantizer if it has a format."""
    env = environment(work, "llama")
    exact = folder / "f32.gguf"
    if not exact.exists():
        env.run(FOREIGN / "gguf_files.py", "convert", folder, exact)
    file = folder / f"{fmt}.gguf" if fmt else exact
    if not file.exists():
        env.run(FOREIGN / "peer_llama_cpp.py", "quantize", exact, file, fmt)
    return file


def compressed_file(folder: Path, fmt: str) -> Path:
    """A file made by `quire compress` of the float32 weights in `folder`."""
    out = folder.parent / f"{folder.name}-quire-{fmt}"
    if not out.exists():
        recipe = {"stage": [{"kind": "quantize", "method": "gguf", "format": fmt}]}
        compress(str(folder), out, recipe_of(recipe, "the benchmark's recipe"), lambda _: None)
    return next(out.glob("*.gguf"))


def run_llama_cpp(work: Path, folder: Path, fmt: str | None, windows: list[list[int]], cache: str = "f16") -> Run:
    """The same from llama.cpp, on such a file, with keys and values of type `cache`."""
    import numpy as np

    env, file = environment(work, "llama"), gguf_file(work, folder, fmt)
    longest = str(max(512, *map(len, windows)))
    words = [env.python, str(FOREIGN / "peer_llama_cpp.py"), str(file), "2", "1", longest, cache]
    process = Process("llama.cpp", Command(words, env.variables), work / "q.log")
    out = folder / "logits.npy"
    found = []
    for window in windows:
        process.ask({"do": "logits", "tokens": window, "out": str(out)})
        found.append(torch.from_numpy(np.load(out)))
    process.close()
    return Run(found, file.stat().st_size)


def divergences(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) of each position of logits [n, vocabulary], and whether the most likely tokens are the same."""
    parts = []
    for at in range(0, len(p), ROWS):
        a, b = (x[at : at + ROWS].log_softmax(-1) for x in (p, q))
        parts.append((a.exp() * (a - b)).sum(-1).clamp_min(0).double())
    return torch.cat(parts), p.argmax(-1) == q.argmax(-1)


def summary(found: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """KL divergence (mean, 99th percentile of positions) and share of positions with the same most likely token."""
    kl, same = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {"kl": float(kl.mean()), "kl_p99": float(kl.quantile(0.99)), "top1": float(same.double().mean())}


def compare(exact: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """`summary` of all windows."""
    return summary([divergences(p, q) for p, q in zip(exact, found, strict=True)])


def text_windows(count: int) -> list[list[int]]:
    """Windows of the held-out text, evenly spread."""
    tokenizer = Tokenizer.from_folder(PYDOC)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in heldout_texts(PYDOC).values()]
    every = [ids[at : at + WINDOW] for ids in rows for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return every[:: max(1, len(every) // count)][:count]


def random_windows(count: int, vocabulary: int) -> list[list[int]]:
    """Windows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, vocabulary, (count, WINDOW), generator=generator).tolist()


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Normal matrices of variance 1 / columns, so that the layers weigh as much as the embedding."""
    generator = torch.Generator().manual_seed(0)
    hidden = config["hidden_size"]
    weights = {"model.embed_tokens.weight": torch.randn((config["vocab_size"], hidden), generator=generator) * 0.02}
    weights["model.norm.weight"] = torch.ones(hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for short, name in MATRICES.items():
            n, k = shape_of(short, config)
            weights[f"{at}.{name}.weight"] = torch.randn((n, k), generator=generator) * k**-0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = torch.ones(hidden)
    return weights


def plant(weights: dict[str, Tensor]) -> None:
    """One channel of each norm's output OUTLIER times larger, what reads it as much smaller: the same function."""
    readers = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
               "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}  # fmt: skip
    for name, norm in weights.items():
        layer, _, last = name.removesuffix(".weight").rpartition(".")
        for reader in readers.get(last, ()):
            weights[f"{layer}.{reader}.weight"][:, CHANNEL] /= OUTLIER
        if last in readers:
            norm[CHANNEL] *= OUTLIER


def write_model(name: str, folder: Path, layers: int) -> dict[str, Any]:
    """A folder with float32 weights, and its config."""
    if name == "pydoc":
        config = json.loads((PYDOC / "config.json").read_text())
        weights = {k: v.float() for k, v in load_file(PYDOC / "model.safetensors").items()}
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((PYDOC / file).read_bytes())
    else:
        config = SHAPES["llama-1b"] | {"num_hidden_layers": layers, "architectures": ["LlamaForCausalLM"]}
        weights = random_weights(config)
        if name == "outlier":
            plant(weights)
        write_tokenizer("llama-1b", folder)
    config |= {"torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return config


def measure(args: argparse.Namespace, name: str, folder: Path) -> Iterable[dict[str, Any]]:
    """A row for every format of one model. A format that this model cannot have gives a row with the reason."""
    named: dict[str, list[int]] = {}
    if name == "smollm2":
        folder = smollm2.float32_folder(args.work)
        named = smollm2.texts(folder)
        windows = [*named.values()]
    else:
        config = write_model(name, folder, args.layers)
        windows = text_windows(args.windows) if name == "pydoc" else random_windows(args.windows, config["vocab_size"])
    exact = run_quire(folder, {"dtype": "float32", "kv_cache_dtype": "float32"}, windows).logits
    for label in args.format:
        row: dict[str, Any] = {"model": name, "format": label, "positions": sum(map(len, windows))}
        try:
            found = run(args.work, folder, label, windows)
        except QuireError as error:
            yield row | {"refused": error.message}
            continue
        parts = [divergences(p, q) for p, q in zip(exact, found.logits, strict=True)]
        row |= summary(parts) | {"weight_bytes": found.nbytes}
        texts = {text: summary([part]) for text, part in zip(named, parts, strict=False)}
        yield row | ({"texts": texts} if texts else {})


def run(work: Path, folder: Path, label: str, windows: list[list[int]]) -> Run:
    """Every window in the format `label`. Raises `QuireError` when an engine refuses it."""
    if label in QUIRE:
        return run_quire(folder, QUIRE[label], windows)
    if label in FILES:
        return run_quire(gguf_file(work, folder, FILES[label]), {"dtype": "bfloat16"}, windows)
    if label in WRITTEN:
        return run_quire(compressed_file(folder, WRITTEN[label]), {"dtype": "bfloat16"}, windows)
    if label in LLAMA_CPP_CACHES:
        return run_llama_cpp(work, folder, None, windows, LLAMA_CPP_CACHES[label])
    return run_llama_cpp(work, folder, LLAMA_CPP[label], windows)


class Kept:
    """The rows of a file of results; a row that is measured again takes the place of the old one."""

    def __init__(self, file: Path, layers: int) -> None:
        self.file, self.layers = file, layers
        self.rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the file too."""
        if row["model"] in ("random", "outlier"):
            row["layers"] = self.layers
        self.rows = [r for r in self.rows if (r["model"], r["format"]) != (row["model"], row["format"])] + [row]
        self.rows.sort(key=lambda r: (MODELS.index(r["model"]), FORMATS.index(r["format"])))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"window": WINDOW, "rows": self.rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a line for each format, KL divergence and agreement on each model."""
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    found = {(r["model"], r["format"]): r for r in rows if "kl" in r}
    lines = ["| format | " + " | ".join(f"{m}: KL | top-1 | MB" for m in models) + " |"]
    lines.append("|---" * (1 + 3 * len(models)) + "|")
    for label in FORMATS:
        cells = []
        for m in models:
            row = found.get((m, label))
            cells += ["", "", ""] if row is None else [
                f"{row['kl']:.2g}", f"{100 * row['top1']:.1f} %", f"{row['weight_bytes'] / 1e6:.1f}",
            ]  # fmt: skip
        if any(cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measure, print a line for each row, write JSON as soon as a row is there."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=FORMATS)
    parser.add_argument("--windows", type=int, default=16, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--layers", type=int, default=2, help="layers of the random models")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "quality.json")
    parser.add_argument("--table", action="store_true", help="print what --output holds as Markdown, measure nothing")
    args = parser.parse_args()
    kept = Kept(args.output, args.layers)
    if args.table:
        print("\n".join(table(kept.rows)))
        return
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(args, name, Path(folder)):
                kept.add(row)
                figures = row.get("refused") or (
                    f"KL {row['kl']:.6f}  p99 {row['kl_p99']:.5f}  top-1 {100 * row['top1']:.2f} %  "
                    f"{row['weight_bytes'] / 1e6:.1f} MB"
                )
                print(f"{name:8s} {row['format']:18s} {figures}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
