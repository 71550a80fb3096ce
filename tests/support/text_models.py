"""Tokenizer folders for tests of the text edge."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from quire.model.disk.checkpoint import EMBEDDED

PYDOC = EMBEDDED


def sentencepiece_folder(folder: Path) -> Path:
    """A tokenizer as converted from SentencePiece: "▁" for spaces, byte fallback, BOS, leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz.é", "▁h", "ll", "he", "▁he", "llo", "▁hello"):
        vocab[piece] = len(vocab)
    merges = [("▁", "h"), ("l", "l"), ("h", "e"), ("▁h", "e"), ("ll", "o"), ("▁he", "llo")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
