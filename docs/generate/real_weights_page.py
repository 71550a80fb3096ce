"""The figures of benchmarks/results/real_weights.json as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from words import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "real_weights.json"


def _found(kind: str) -> dict[str, dict[str, Any]]:
    """The entries `KIND NAME` by their names."""
    entries = json.loads(RESULTS.read_text()).items()
    return {name.removeprefix(f"{kind} "): entry for name, entry in entries if name.startswith(f"{kind} ")}


def vectors() -> str:
    """A row for each format of weights."""
    rows = [
        (
            name,
            f"{each['least_cosine']:.7f}",
            f"{each['mean_cosine']:.7f}",
            f"{each['below_0.999']} of {each['texts'] + each['sentences']:,}",
            f"{each['spearman']:.4f}",
            f"{each['their_spearman']:.4f}",
        )
        for name, each in _found("vectors").items()
    ]
    head = ("weights", "least cosine", "mean cosine", "below 0.999", "rank correlation", "of sentence-transformers")
    return table(head, rows)


def speech() -> str:
    """A row for each sound and tool."""
    rows = [
        (
            f"{sound}, {each['seconds']:.0f} s",
            tool,
            "the same" if beside["same_words"] else "differ",
            "the same" if beside["same_text"] else "differs",
            "the same" if beside["same_times"] else "differ",
            f"{each['word_errors']} of {each['words']}",
            f"{beside['word_errors']}",
        )
        for sound, each in _found("speech").items()
        for tool, beside in each["beside"].items()
    ]
    head = ("sound", "compared with", "words", "text", "times", "word errors", "of the other tool")
    return table(head, rows)


def silence() -> str:
    """What an hour of silence took, in a sentence."""
    each = json.loads(RESULTS.read_text())["silence"]
    hour, minute = (each[key] / 1e6 for key in ("peak_bytes", "peak_bytes_of_a_minute"))
    return (
        f"An hour of silence is an empty text. The process had at most {hour:.0f} MB of memory, {minute:.0f} MB for a "
        "minute. An hour's samples are 230 MB, and their spectrogram is 115 MB.\n"
    )
