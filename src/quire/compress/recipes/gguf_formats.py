"""Formats of GGUF files: those that quire writes, and the names under which llama.cpp's users ask for them."""

from __future__ import annotations

from typing import Literal, get_args

GgufFormat = Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FORMATS: tuple[str, ...] = get_args(GgufFormat)
MIXTURES = {
    "Q2_K_S": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
}
"""Names of llama-quantize for mixtures of formats, and the one that quire writes throughout in their place."""


def gguf_format(name: str) -> str | None:
    """The format that a name in any case stands for; None for a name that stands for none."""
    name = name.strip().upper()
    return name if name in FORMATS else MIXTURES.get(name)


def mixture_note(name: str) -> str:
    """What is written where the name of a mixture was given; "" where it was none."""
    name = name.strip().upper()
    if name not in MIXTURES:
        return ""
    return (
        f"{name}: all matrices are written as {MIXTURES[name]}, and the output head as Q6_K; llama.cpp mixes formats "
        "by layer under this name"
    )
