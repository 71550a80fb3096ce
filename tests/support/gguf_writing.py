"""Model folders for GGUF files with tokenizers of their own, and GGUF tensors read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.compress.layouts.gguf_vocab import TEXTS
from quire.quant.gguf import TYPES, Block
from quire.text.gguf_tokenizer import PRE
from torch_weights import load_torch

PLAIN = {"F32": np.float32, "F16": np.float16}


def decoded(raw: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """The numbers f32 of rows of bytes, by the reader."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).astype(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return load_torch(Block(TYPES[kind]), {kind: torch.from_numpy(raw)}, torch.float32).dequantize().numpy()


def normal(n: int = 8, k: int = 1024, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


VOCAB = 400
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": 2, "bos_token_id": 1}


def words() -> list[str]:
    return [*TEXTS, *("the quick brown fox jumps over the lazy dog and then returns home",) * 20]


def byte_level(pre: str = "qwen2") -> Tokenizer:
    """A byte-level tokenizer that cuts text as `pre`, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE[pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(words(), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def pieces() -> Tokenizer:
    """A tokenizer in the manner of Llama 2: pieces of words, bytes for what has none."""
    space = "\u2581"
    letters = [space, *"abcdefghijklmnopqrstuvwxyz"]
    made = [
        (space, "t"),
        ("h", "e"),
        (f"{space}t", "he"),
        ("i", "n"),
        ("e", "r"),
        (space, "a"),
        ("o", "v"),
        ("ov", "er"),
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *(a + b for a, b in made)]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, made, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def small() -> Tokenizer:
    """Pieces of letters alone, fewer than the rows of the smallest models."""
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def add_tokenizer(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = "</s>" if tokenizer.token_to_id("</s>") is not None else "<|im_end|>"
    named = {"bos_token": "<s>", "eos_token": eos, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
