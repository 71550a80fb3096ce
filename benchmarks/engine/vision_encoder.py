"""Images: encoding one by a vision tower, beside transformers' code for the same weights.

    python -m benchmarks.engine.vision_encoder encode [--threads N] [--rounds 7] [--layers 27] [--pixels 672]
    python -m benchmarks.engine.vision_encoder again     # time to the first token behind an image that was there

The tower has the shape of SigLIP-so400m (hidden 1,152, 27 layers, 16 heads, MLP 4,304, patches of 14 x 14 pixels) and
random weights in bf16, written once so that both read the same. The two take turns on the same threads; the median of
the ratios of each round is given, with the largest difference of their features. transformers' time is that of its
`get_image_features` of pixels that were normalized before, quire's begins with bytes. Results: results/vision.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.results import measure, parser_of
from quire.bench.drive import drive
from quire.core.config import DeviceConfig, flat_config
from quire.core.images import PromptImage, placeholders
from quire.core.params import SamplingParams
from quire.engine.local import LocalEngine
from quire.engine.requests import EncodedPrompt, make_request
from quire.figures.machine import this_machine
from quire.model.build import load_model
from quire.ops.arrays import to_torch
from quire.ops.backend import open_backend

SO400M = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
          "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}  # fmt: skip
TEXT = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 512,
        "max_position_embeddings": 4096}  # fmt: skip


def write_model(folder: Path, layers: int, pixels: int) -> Any:
    """A LLaVA whose tower is large and whose decoder is small, in bf16."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    tower = SO400M | {"num_hidden_layers": layers, "image_size": pixels}
    facts = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 500}
    config = AutoConfig.for_model("llava", vision_config=tower, text_config=TEXT, **facts)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.save_pretrained(folder)
    return model


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds, and what came of them."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def encode(args: argparse.Namespace) -> dict[str, Any]:
    """One image, by both in turns."""
    size, side = args.pixels, args.pixels // 14
    noise = torch.randint(0, 256, (1, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    shown = PromptImage(
        key=b"", pixels=noise.numpy().tobytes(), shape=(1, size, size), runs=((0, side**2),), size=(size, size)
    )
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_model(Path(folder), args.layers, size)
        ops = open_backend(DeviceConfig(device="cpu", threads=args.threads))
        vision = load_model(flat_config(model=folder), ops).vision
    assert vision is not None, "the folder has a tower"
    torch.set_num_threads(args.threads)
    told = vision.reading.pixels
    values = (noise.float() * told.factor - torch.tensor(told.mean)) / torch.tensor(told.std)
    pixels = values.permute(0, 3, 1, 2).bfloat16()

    def transformers() -> Tensor:
        with torch.inference_mode():
            found: Tensor = theirs.get_image_features(pixels).pooler_output[0]
        return found

    ways: dict[str, Callable[[], Tensor]] = {
        "quire": lambda: to_torch(ops.host(vision(shown))),
        "transformers": transformers,
    }
    features = {name: work().float() for name, work in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds):
        for name in reversed(ways) if turn % 2 else ways:
            seconds[name].append(timed(ways[name])[0])
    ratios = [b / a for a, b in zip(seconds["quire"], seconds["transformers"], strict=True)]
    apart = (features["quire"] - features["transformers"]).abs().max() / features["transformers"].abs().max()
    return {
        "machine": this_machine().name,
        "threads": ops.threads,
        "shape": f"{size} x {size} pixels, {side**2} patches, {args.layers} layers",
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "largest_difference": round(float(apart), 4),
    }


QWEN = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 3072, "head_dim": 128, "vocab_size": 32000,
        "max_position_embeddings": 4096, "tie_word_embeddings": True}  # fmt: skip
TEXT_TOKENS = 16


def again(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt with an image: a new one, the same behind another text (its features
    are kept), the same prompt with another question (its keys and values are, too), and of as many tokens of text.
    """
    side = args.pixels // 14
    facts = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 31000}
    tower = SO400M | {"num_hidden_layers": args.layers, "image_size": args.pixels}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "bfloat16",
              "vision_config": tower, "text_config": QWEN, **facts}  # fmt: skip
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "SiglipImageProcessor"})
        )
        options = {"load_format": "dummy", "quantization": "int8", "max_model_len": 4096, "num_blocks": 1024}
        engine = LocalEngine(flat_config(model=folder, threads=args.threads, **options))
        for turn in range(args.rounds + 1):
            rng = np.random.default_rng(turn)
            pixels = rng.integers(0, 256, (1, args.pixels, args.pixels, 3), np.uint8).tobytes()
            texts = [tuple(rng.integers(16, 30000, TEXT_TOKENS).tolist()) for _ in range(4)]
            asked = {
                "new": (texts[0], texts[1]), "same picture": (texts[2], texts[1]), "same prompt": (texts[0], texts[3]),
            }  # fmt: skip
            for name, (before, after) in asked.items():
                key = hashlib.blake2b(pixels, digest_size=16).digest()
                runs, shape, size = ((TEXT_TOKENS, side**2),), (1, args.pixels, args.pixels), (args.pixels,) * 2
                image = PromptImage(key=key, pixels=pixels, shape=shape, runs=runs, size=size)
                ids = [*before, *placeholders(key, side**2, engine.info.vocab_size), *after]
                found.setdefault(name, []).append(first_token(engine, EncodedPrompt(ids, (image,)), f"{name} {turn}"))
            text = rng.integers(16, 30000, 2 * TEXT_TOKENS + side**2).tolist()
            found.setdefault("text", []).append(first_token(engine, EncodedPrompt(text), f"text {turn}"))
    return {
        "machine": this_machine().name, "threads": args.threads, "decoder": "qwen-0.6b, int8",
        "picture": f"{args.pixels} x {args.pixels} pixels, {side**2} rows, a tower of {args.layers} layers in bf16",
        "ttft_ms": {name: round(1e3 * statistics.median(values[1:]), 1) for name, values in found.items()},
    }  # fmt: skip


def first_token(engine: LocalEngine, prompt: EncodedPrompt, name: str) -> float:
    """Seconds to it, alone."""
    request = make_request(engine.info, prompt, SamplingParams(max_tokens=1, temperature=0.0), request_id=name, seed=0)
    [record], _ = drive(engine, [request])
    return record.ttft


PARTS = {"encode": encode, "again": again}


def main() -> None:
    """Run the parts that were asked for."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--pixels", type=int, default=672)
    measure(PARTS, parser.parse_args(), "vision")


if __name__ == "__main__":
    main()
