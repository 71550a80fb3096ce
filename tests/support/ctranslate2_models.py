"""Whisper as CTranslate2 keeps it (model.bin), written as the folder that transformers has."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
PARTS = "weight", "bias"
Tensors = dict[str, NDArray[Any]]


def read_variables(path: Path) -> Tensors:
    """The variables of a model.bin, and under their other names those that have several."""
    data, at = path.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(kind)
        return int(found)

    def text() -> str:
        nonlocal at
        length = number("H")
        found = data[at : at + length].rstrip(b"\0").decode()
        at += length
        return found

    assert number("I") >= 5
    text()
    number("I")
    found: Tensors = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = [number("I") for _ in range(rank)]
        dtype, size = DTYPES[number("B")], number("I")
        found[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
        at += size
    for _ in range(number("I")):
        other = text()
        found[other] = found[text()]
    return found


def _named(found: Tensors) -> Tensors:
    """The tensors under transformers' names."""
    made: Tensors = {}

    def take(theirs: str, ours: str, parts: tuple[str, ...] = PARTS, rows: tuple[int, int] = (0, 1)) -> None:
        for part, own in zip(parts, PARTS, strict=True):
            if f"{theirs}/{part}" in found:
                whole = found[f"{theirs}/{part}"]
                each = len(whole) // rows[1]
                made[f"model.{ours}.{own}"] = np.ascontiguousarray(
                    whole[rows[0] * each : (rows[0] + 1) * each], np.float32
                )

    norm = ("gamma", "beta")
    for stack in ("encoder", "decoder"):
        take(f"{stack}/layer_norm", f"{stack}.layer_norm", norm)
        made[f"model.{stack}.embed_positions.weight"] = found[f"{stack}/position_encodings/encodings"].astype(
            np.float32
        )
        for i in range(
            sum(name.startswith(f"{stack}/layer_") and name.endswith("ffn/linear_0/bias") for name in found)
        ):
            theirs, ours = f"{stack}/layer_{i}", f"{stack}.layers.{i}"
            take(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm", norm)
            for number, part in enumerate("qkv"):
                take(f"{theirs}/self_attention/linear_0", f"{ours}.self_attn.{part}_proj", rows=(number, 3))
            take(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            take(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm", norm)
            take(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
            for number, part in enumerate("kv"):
                take(f"{theirs}/attention/linear_1", f"{ours}.encoder_attn.{part}_proj", rows=(number, 2))
            take(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
            take(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm", norm)
            take(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            take(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    take("encoder/conv1", "encoder.conv1")
    take("encoder/conv2", "encoder.conv2")
    made["model.decoder.embed_tokens.weight"] = found["decoder/embeddings/weight"].astype(np.float32)
    return {name: tensor for name, tensor in made.items() if not name.endswith("k_proj.bias")}


def convert_whisper(source: Path, folder: Path) -> None:
    """Write the folder of transformers' layout for CTranslate2's `source`."""
    tensors = _named(read_variables(source / "model.bin"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    layers = {stack: sum(f"{stack}.layers" in name and name.endswith("fc1.bias") for name in tensors)
              for stack in ("encoder", "decoder")}  # fmt: skip
    english = vocabulary == 51864
    start = 50257 if english else 50258
    config = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
        "vocab_size": vocabulary, "d_model": width, "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"], "encoder_attention_heads": width // 64,
        "decoder_attention_heads": width // 64, "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1], "activation_function": "gelu",
        "max_source_positions": 1500, "max_target_positions": 448, "decoder_start_token_id": start,
        "eos_token_id": start - 1, "bos_token_id": start - 1, "pad_token_id": start - 1, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    told = json.loads((source / "config.json").read_text())
    generation = {
        "suppress_tokens": told["suppress_ids"], "begin_suppress_tokens": told["suppress_ids_begin"],
        "is_multilingual": not english, "max_initial_timestamp_index": 50, "no_timestamps_token_id": start + 105,
        "decoder_start_token_id": start, "eos_token_id": start - 1, "pad_token_id": start - 1, "max_length": 448,
        "prev_sot_token_id": start + 103,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(source / "tokenizer.json", folder)
