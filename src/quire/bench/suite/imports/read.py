"""Which tool wrote a file, told by what is in it, and its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.bench.suite.imports import aiperf, guidellm, llama_bench, llm_inference_bench, vllm
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow

MAX_BYTES = 256 << 20
KNOWN = (
    "LLM-Inference-Bench (All_results.csv), vllm bench serve, latency and throughput (JSON), "
    "GuideLLM (benchmarks.json), llama-bench (json, jsonl, csv, md), AIPerf (profile_export_aiperf.json or .csv)"
)


def read_foreign(path: Path) -> list[FigureRow]:
    """The rows of a file; `ConfigError` where it is none of what is known, or broken."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES:,} bytes; is it a summary?")
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text; known are {KNOWN}") from None
    where = str(path)
    if llm_inference_bench.knows(text):
        return llm_inference_bench.read(text, where)
    found = _json(text)
    if vllm.knows(found):
        return vllm.read(text, where)
    if guidellm.knows(found):
        return guidellm.read(text, where)
    if llama_bench.knows(text, found):
        return llama_bench.read(text, where)
    if aiperf.knows(text, found):
        return aiperf.read(text, where)
    raise ConfigError(f"{path}: no file of a tool that is known; known are {KNOWN}")


def _json(text: str) -> Any:
    """What the text is, or its first line (JSON lines); None where neither is JSON."""
    import json

    for part in (text, text.lstrip().partition("\n")[0]):
        try:
            return json.loads(part)
        except (ValueError, RecursionError):
            continue
    return None
