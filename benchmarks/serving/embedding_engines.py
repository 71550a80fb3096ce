"""An engine that makes vectors, as a measured process (see `quire.bench.suite.foreign.protocol`).

    python embedding_engines.py ENGINE MODEL FORMAT THREADS [POOLING]

`embed` makes the vectors of texts and says the seconds it took; `vectors` gives them. MODEL is a folder of
sentence-transformers, for fastembed a folder of an ONNX file and a tokenizer, for llama.cpp a GGUF file. Each engine
batches by itself as it does by default, but for 64 texts in a batch where it has a number of texts for that.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "quire" / "bench" / "suite" / "foreign"))

from protocol import serve

BATCH = 64
ROWS = 512
"""Tokens of a step of llama.cpp, which must hold the longest text whole; a larger one was slower."""


class Quire:
    """`LLM.embed`; FORMAT is a dtype, or weights quantized at load beside bfloat16, as such formats are served."""

    def __init__(self, model: str, kind: str, threads: int, pooling: str) -> None:
        from quire import LLM

        quantized = {"quantization": kind, "dtype": "bfloat16"}
        named = quantized if kind in ("int8", "int4") else {"dtype": kind}
        self.llm = LLM(model, device="cpu", threads=threads, **named)

    def __call__(self, texts: list[str]) -> Any:
        return [each.outputs.embedding for each in self.llm.embed(texts, use_tqdm=False)]


class SentenceTransformers:
    """`SentenceTransformer.encode` on torch's threads."""

    def __init__(self, model: str, kind: str, threads: int, pooling: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self.model = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, kind)})
        self.model.max_seq_length = 512

    def __call__(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=BATCH, show_progress_bar=False)


class FastEmbed:
    """`TextEmbedding.embed` of ONNX Runtime; FORMAT int8 is its dynamic quantization of the same file."""

    def __init__(self, model: str, kind: str, threads: int, pooling: str) -> None:
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        file = "model_int8.onnx" if kind == "int8" else "model.onnx"
        TextEmbedding.add_custom_model(
            model="measured/model",
            pooling=PoolingType.CLS if pooling == "cls" else PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="measured/model"),
            dim=1,
            model_file=file,
        )
        self.model = TextEmbedding("measured/model", specific_model_path=model, threads=threads)

    def __call__(self, texts: list[str]) -> Any:
        return list(self.model.embed(texts, batch_size=BATCH))


class LlamaCpp:
    """`Llama.embed` of llama-cpp-python."""

    def __init__(self, model: str, kind: str, threads: int, pooling: str) -> None:
        import llama_cpp

        self.model = llama_cpp.Llama(
            model, embedding=True, n_ctx=0, n_batch=ROWS, n_ubatch=ROWS, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    def __call__(self, texts: list[str]) -> Any:
        return self.model.embed(texts, normalize=True)


ENGINES = {
    "quire": Quire,
    "sentence-transformers": SentenceTransformers,
    "fastembed": FastEmbed,
    "llama.cpp": LlamaCpp,
}


class Measured:
    """What the protocol calls."""

    def __init__(self, name: str, model: str, kind: str, threads: int, pooling: str) -> None:
        self.run = ENGINES[name](model, kind, threads, pooling)

    def facts(self) -> dict[str, Any]:
        """Nothing: the benchmark knows what it started."""
        return {}

    def embed(self, texts: list[str], times: int) -> dict[str, Any]:
        """Seconds of each of `times` runs over all texts."""
        took = []
        for _ in range(times):
            start = time.perf_counter()
            self.run(texts)
            took.append(time.perf_counter() - start)
        return {"seconds": took}

    def vectors(self, texts: list[str]) -> dict[str, Any]:
        """The vectors."""
        return {"vectors": [np.asarray(each, np.float64).tolist() for each in self.run(texts)]}


if __name__ == "__main__":
    serve(Measured(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:6] or ["mean"]))
