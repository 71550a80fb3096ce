"""Tokenizers of unigrams and of WordPiece, and what llama.cpp's converter makes of the latter."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gguf_writing import words
from quire.gguf.vocab import CONTROL, NORMAL
from quire.gguf.writer import write_file

SPACE = "\u2581"


def charsmap() -> bytes:
    """A map as SentencePiece compiles it, a double array and texts, in which a tab becomes a space."""
    units = [0] * 256
    units[0] = 16 << 10
    units[16 ^ 9] = 9 | 1 << 8 | 2 << 10
    units[16 ^ 9 ^ 2] = 1 << 31
    return struct.pack("<I256I", 1024, *units) + b" \0"


def unigrams(merge: bool = True, prefix: bool = True) -> Tokenizer:
    """A tokenizer in the manner of T5's, trained on a few words."""
    tokenizer, steps = Tokenizer(models.Unigram()), [normalizers.Precompiled(charsmap())]
    scheme = "always" if prefix else "never"
    if merge:
        words_apart = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Metaspace(SPACE, scheme)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words_apart)
    else:
        steps += [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=330, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("\t", " ") for text in words()], trainer)
    made = json.loads(tokenizer.to_str())
    made["model"]["vocab"] = [[piece, float(np.float32(score))] for piece, score in made["model"]["vocab"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def wordpiece(lowercase: bool = True) -> Tokenizer:
    """A tokenizer in the manner of BERT's, trained on a few words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=1 << 20))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(words(), trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def write_wordpiece(path: Path, tokenizer: Tokenizer, **further: Any) -> None:
    """A file of a vocabulary alone: pieces that begin a word are marked, the others not."""
    ids = tokenizer.get_vocab()
    named = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokens = sorted(ids, key=ids.__getitem__)
    marked = [t if t in named else t.removeprefix("##") if t.startswith("##") else SPACE + t for t in tokens]
    metadata: dict[str, Any] = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": np.array([CONTROL if t in named else NORMAL for t in tokens], "<i4"),
    }
    roles = zip(("padding", "unknown", "cls", "seperator", "mask"), named, strict=True)
    metadata |= {f"tokenizer.ggml.{role}_token_id": ids[text] for role, text in roles}
    write_file(path, metadata | {"tokenizer.ggml.bos_token_id": ids["[CLS]"]} | further, [], [])
