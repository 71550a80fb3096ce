"""Tables of encoders and of speech beside other engines, from benchmarks/results."""

from __future__ import annotations

from typing import Any

from charts import results
from words import table

CASES = {"1x16": "1 of 16", "1x512": "1 of 512", "64x16": "64 of 16", "64x512": "64 of 512"}


def texts_per_second() -> str:
    """A table for each model and machine: texts a second in each case, and the least cosine with exact vectors."""
    parts = []
    for name, found in sorted(results("embeddings.json").items()):
        if "texts_per_s" not in found:
            continue
        cases = found["texts_per_s"]
        engines = dict.fromkeys(engine for each in cases.values() for engine in each if engine != "ratios")
        rows = [
            (engine, *(_number(cases.get(case, {}).get(engine)) for case in CASES), f"{found['cosines'][engine]:.4f}")
            for engine in engines
        ]
        heads = ("", *(CASES[case] for case in CASES), "least cosine")
        parts.append(f"{name}:\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def over_http() -> str:
    """A row for each case: texts a second of `LLM.embed`, and what share of it clients of a route get."""
    parts = []
    for name, found in sorted(results("embeddings.json").items()):
        if "texts_per_s" in found:
            continue
        ways = [way for way in next(iter(found.values())) if way != "LLM.embed"]
        rows = [(way, *(f"{found[case][way]:.2f}" if way in found[case] else "" for case in found)) for way in ways]
        first = ("`LLM.embed`, texts/s", *(_number(found[case]["LLM.embed"]) for case in found))
        parts.append(f"{name}:\n\n{table(('', *(CASES[case] for case in found)), [first, *rows])}")
    return "\n\n".join(parts)


def transcriptions() -> str:
    """A row for each engine: seconds, the real-time factor, and words that differ."""
    parts = []
    for name, found in sorted(results("transcription.json").items()):
        rows = [
            (engine, f"{row['seconds']:.2f}", f"{row['real_time_factor']:.4f}", str(row["words_that_differ"]))
            for engine, row in found["engines"].items()
        ]
        heads = ("", f"seconds for {found['sound_s']:.0f} s", "real-time factor", f"of {found['words']} words differ")
        parts.append(f"{name}:\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
