"""Whisper from a folder of transformers as whisper.cpp's file: hyperparameters, filters, vocabulary, tensors.

The layout is that of whisper.cpp's own converter of such folders (models/convert-h5-to-ggml.py).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from quire.audio.log_mel import filters

MAGIC = 0x67676D6C
SIZES = (
    "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
    "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins",
)  # fmt: skip
NAMES = {
    "self_attn.k_proj": "attn.key", "self_attn.q_proj": "attn.query", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln",
    "encoder_attn.q_proj": "cross_attn.query", "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value", "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0", "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
    "embed_positions.weight": "positional_embedding", "embed_tokens": "token_embedding", "layers": "blocks",
}  # fmt: skip
OUTER = {"encoder.layer_norm": "encoder.ln_post", "decoder.layer_norm": "decoder.ln"}
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that byte-level vocabularies write as themselves; the others follow from 256 on."""


def write_ggml(folder: Path, out: Path) -> None:
    """Write the model of `folder` with matrices in f16."""
    config = json.loads((folder / "config.json").read_text())
    with out.open("wb") as file:
        file.write(struct.pack("<I11i", MAGIC, *(config[name] for name in SIZES), 1))
        table = filters(config["num_mel_bins"]).T.astype(np.float32)
        file.write(struct.pack("<2i", *table.shape) + table.tobytes())
        words = _vocabulary(folder)
        file.write(struct.pack("<i", len(words)))
        for word in words:
            file.write(struct.pack("<i", len(word)) + word)
        for name, data in load_file(folder / "model.safetensors").items():
            if name != "proj_out.weight":
                _write(file, _named(name), data.astype(np.float32))


def _vocabulary(folder: Path) -> list[bytes]:
    others = [byte for byte in range(256) if byte not in BYTES]
    back = {chr(byte): byte for byte in BYTES} | {chr(256 + n): byte for n, byte in enumerate(others)}
    model: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    own = sorted((number, word) for word, number in model.items() if all(letter in back for letter in word))
    return [bytes(back[letter] for letter in word) for number, word in own if number < 50257 and word[:2] != "<|"]


def _named(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in OUTER.items():
        if name.startswith(theirs + "."):
            return name.replace(theirs, ours)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _write(file: BinaryIO, name: str, data: NDArray[Any]) -> None:
    """Vectors, positions and biases of convolutions (as columns) stay f32."""
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        data = data[:, None]
    half = data.ndim > 1 and name not in (
        "encoder.conv1.bias", "encoder.conv2.bias", "encoder.positional_embedding", "decoder.positional_embedding",
    )  # fmt: skip
    data = data.astype(np.float16) if half else data
    file.write(struct.pack("<3i", data.ndim, len(name), int(half)))
    file.write(struct.pack(f"<{data.ndim}i", *data.shape[::-1]) + name.encode() + data.tobytes())
