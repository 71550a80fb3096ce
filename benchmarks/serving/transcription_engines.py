"""An engine that writes down speech, as a measured process (see `quire.bench.suite.foreign.protocol`).

    python transcription_engines.py ENGINE MODEL FORMAT THREADS

`transcribe` writes down a wav file of 16 kHz, greedily and without the text before a window, and says the seconds and
the words. MODEL is a folder of transformers, for faster-whisper one of CTranslate2, for whisper.cpp its own file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "quire" / "bench" / "suite" / "foreign"))

from protocol import serve


class Quire:
    """`LLM.transcribe`; FORMAT is a dtype, or weights quantized at load beside bfloat16."""

    def __init__(self, model: str, kind: str, threads: int) -> None:
        from quire import LLM

        quantized = {"quantization": kind, "dtype": "bfloat16"}
        named = quantized if kind in ("int8", "int4") else {"dtype": kind}
        self.llm = LLM(model, device="cpu", threads=threads, **named)

    def __call__(self, file: str) -> str:
        found: str = self.llm.transcribe(file, temperature=0.0, condition_on_previous_text=False).text
        return found


class FasterWhisper:
    """`WhisperModel.transcribe`; FORMAT is CTranslate2's compute type."""

    def __init__(self, model: str, kind: str, threads: int) -> None:
        from faster_whisper import WhisperModel

        self.model = WhisperModel(model, device="cpu", compute_type=kind, cpu_threads=threads)

    def __call__(self, file: str) -> str:
        told: dict[str, Any] = {"beam_size": 1, "temperature": 0.0, "language": "en"}
        segments, _ = self.model.transcribe(file, condition_on_previous_text=False, **told)
        return "".join(segment.text for segment in segments)


class WhisperCpp:
    """`pywhispercpp`, whose default is greedy; no fallback to other temperatures."""

    def __init__(self, model: str, kind: str, threads: int) -> None:
        from pywhispercpp.model import Model

        more = {"print_progress": False, "print_realtime": False, "no_context": True, "temperature_inc": 0.0}
        self.model = Model(model, n_threads=threads, **more)

    def __call__(self, file: str) -> str:
        return " ".join(segment.text for segment in self.model.transcribe(file))


ENGINES = {"quire": Quire, "faster-whisper": FasterWhisper, "whisper.cpp": WhisperCpp}


class Measured:
    """What the protocol calls."""

    def __init__(self, name: str, model: str, kind: str, threads: int) -> None:
        self.run = ENGINES[name](model, kind, threads)

    def facts(self) -> dict[str, Any]:
        """Nothing: the benchmark knows what it started."""
        return {}

    def transcribe(self, file: str) -> dict[str, Any]:
        """Seconds, and the words."""
        start = time.perf_counter()
        text = self.run(file)
        return {"seconds": time.perf_counter() - start, "words": text.split()}


if __name__ == "__main__":
    serve(Measured(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
