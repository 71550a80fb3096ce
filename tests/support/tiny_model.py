"""A model folder of a few kilobytes with a byte-level tokenizer, for tests of everything above the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.ops.native import load_native

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DEVICE = "reference" if load_native() is None else "cpu"
OPTIONS: dict[str, Any] = {"load_format": "dummy", "device": DEVICE, "dtype": "float32", "num_blocks": 64}
"""Random weights for the folder's shapes, run without a file of weights, and without a compiler where there is none."""


def write_tiny(folder: Path, chat: bool = True) -> Path:
    """Write config and tokenizer of a model of two layers; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": len(vocab),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 3,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    extra = {"chat_template": TEMPLATE} if chat else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", **extra}))
    return folder
