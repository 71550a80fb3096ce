"""The characters that byte-level BPE writes bytes as (Radford et al. 2019)."""

from __future__ import annotations


def _byte_table() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_table()
"""Character -> byte: itself if printable, else from U+0100 on."""
CHARACTER_OF = {b: c for c, b in BYTE_OF.items()}
"""Byte -> character."""
