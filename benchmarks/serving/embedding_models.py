"""The models of `benchmarks.serving.embeddings`: a folder of sentence-transformers, and what others read made of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.bench.suite.environments import Environment, environment

HERE = Path(__file__).parent
POSITIONS = 512
MINILM: dict[str, Any] = {}
BGE_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536}
MODERNBERT_BASE = {
    "vocab_size": 30528,
    "pad_token_id": 0,
    "bos_token_id": 101,
    "eos_token_id": 102,
    "cls_token_id": 101,
    "sep_token_id": 102,
}
"""What differs from the defaults of transformers, which has the sizes of ModernBERT-base as its own."""
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "minilm": ("bert", MINILM, "mean"),
    "bge-small": ("bert", BGE_SMALL, "cls"),
    "modernbert-base": ("modernbert", MODERNBERT_BASE, "mean"),
}
"""Name -> type, what its config.json has of its own, pooling. MiniLM's weights are real, the others' random."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A folder of sentence-transformers below `work`."""

    name: str
    work: Path
    pooling: str

    @property
    def folder(self) -> Path:
        """The folder."""
        return self.work / f"embed-{self.name}"

    @property
    def onnx(self) -> Path:
        """Folder with model.onnx and model_int8.onnx, exported by torch and quantized by ONNX Runtime."""
        env = environment(self.work, "fastembed")
        return self._made("onnx", lambda part: env.run(HERE / "embedding_onnx.py", self.folder, part))

    def gguf(self, kind: str) -> Path:
        """A GGUF file by llama.cpp's converter; f32, f16 or q8_0."""
        if kind not in ("f32", "f16", "q8_0"):
            return self.folder
        env = environment(self.work, "llama")
        script = next(env.folder.glob("sources/*/vendor/llama.cpp")) / "convert_hf_to_gguf.py"
        here = Environment(Path(sys.prefix), {"PYTHONPATH": str(script.parent / "gguf-py")})
        words = (script, self.folder, "--outtype", kind, "--outfile")
        return self._made(f"{kind}.gguf", lambda part: here.run(*words, part))

    @cached_property
    def words(self) -> list[str]:
        """Whole words of the vocabulary, each one token."""
        vocabulary = json.loads((self.folder / "tokenizer.json").read_text())["model"]["vocab"]
        return sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)

    def _made(self, suffix: str, make: Callable[[Path], None]) -> Path:
        path = self.work / f"embed-{self.name}-{suffix}"
        if not path.exists():
            part = self.work / f"part-{path.name}"
            shutil.rmtree(part, ignore_errors=True)
            part.unlink(missing_ok=True)
            make(part)
            part.rename(path)
        return path


def made_model(name: str, minilm: Path, work: Path) -> EmbeddingModel:
    """The model `name` below `work`; `minilm` is the folder of the real one."""
    kind, facts, pooling = MODELS[name]
    model = EmbeddingModel(name, work, pooling)
    if not model.folder.exists():
        part = work / f"part-{name}"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(minilm, part)
        tokenizer = json.loads((part / "tokenizer.json").read_text())
        (part / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": None, "padding": None}))
        (part / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}))
        if facts:
            _random(part, kind, facts, pooling)
        part.rename(model.folder)
    return model


def _random(folder: Path, kind: str, facts: dict[str, Any], pooling: str) -> None:
    """Random weights in the place of those that are there, with the tokenizer that is there."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **facts), dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    width = model.config.hidden_size
    told = {
        "word_embedding_dimension": width,
        f"pooling_mode_{'cls_token' if pooling == 'cls' else 'mean_tokens'}": True,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
