"""Well-formed GGUF headers with changed contents: what only the checks behind the reader of the format can refuse."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
TYPES = (0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39)
NEAR: tuple[Any, ...] = (0, 1, 2, 3, 4, 5, 8, 16, 24, 31, 48, 63, 64, 100, 255, 65535, 1 << 20, -1, -2)
REALS: tuple[float, ...] = (0.0, 1.0, -1.0, 0.5, 1e-5, 1e-38, 1e6, 1e30, float("nan"), float("inf"))
WORDS = ("", "llama", "gpt2", "qwen3", "qwen2moe", "gemma2", "gpt-oss", "yarn", "longrope", "linear", "none", "default",
         "llama-bpe", "<s>", "\u2581", "a", "x" * 300, "{{ 1 }}", "\0")  # fmt: skip
KEYS = ("attention.sliding_window", "rope.scaling.type", "rope.scaling.factor", "expert_count", "expert_used_count",
        "rope.dimension_count", "attention.head_count_kv", "attention.key_length", "vocab_size", "block_count",
        "attention.sliding_window_pattern", "attn_logit_softcapping", "feed_forward_length",
        "rope.freq_base")  # fmt: skip
Pair = tuple[str, int, Any]
"""Key, value type, value; an array's value is (type of its entries, entries)."""
Info = tuple[str, list[int], int, int]
"""Name, dimensions, type, offset."""


class Reader:
    """Takes a sound header apart."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 8
        tensors, pairs = self.take("<Q"), self.take("<Q")
        self.pairs: list[Pair] = [self.pair() for _ in range(pairs)]
        self.infos: list[Info] = [self.info() for _ in range(tensors)]

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.take("<Q")
        self.at += size
        return self.raw[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(FORMS[kind])
        inner, count = self.take("<I"), self.take("<Q")
        return inner, [self.value(inner) for _ in range(count)]

    def pair(self) -> Pair:
        key, kind = self.string(), self.take("<I")
        return key, kind, self.value(kind)

    def info(self) -> Info:
        name, dims = self.string(), [self.take("<Q") for _ in range(self.take("<I"))]
        return name, dims, self.take("<I"), self.take("<Q")


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        inner, entries = value
        return struct.pack("<IQ", inner, len(entries)) + b"".join(_value(inner, v) for v in entries)
    form = FORMS[kind]
    if form in ("<f", "<d"):
        return struct.pack(form, value)
    return struct.pack("<Q", int(value) % (1 << 64))[: struct.calcsize(form)]


def written(pairs: list[Pair], infos: list[Info], data: bytes) -> bytes:
    """A file with this header and these bytes behind it, aligned to 32."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(infos), len(pairs))]
    out += [_string(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in pairs]
    for name, dims, kind, offset in infos:
        out.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    head = b"".join(out)
    return head + bytes(-len(head) % 32) + data


def _other(kind: int, value: Any, rng: np.random.Generator) -> Any:
    """Another value of the type."""
    if kind == STRING:
        return WORDS[int(rng.integers(len(WORDS)))]
    if kind == ARRAY:
        inner, entries = value
        entries = list(entries)
        at = int(rng.integers(len(entries) + 1))
        luck = rng.random()
        if luck < 0.5 and at < len(entries):
            entries[at] = _other(inner, entries[at], rng)
        elif luck < 0.7:
            del entries[at:]
        elif luck < 0.9 and entries:
            entries.insert(at, entries[int(rng.integers(len(entries)))])
        else:
            entries = entries[::-1]
        return inner, entries
    choices = REALS if kind in (6, 12) else NEAR
    return value + int(rng.integers(-2, 3)) if rng.random() < 0.4 else choices[int(rng.integers(len(choices)))]


def _change_pair(pairs: list[Pair], rng: np.random.Generator) -> None:
    at = int(rng.integers(len(pairs)))
    key, kind, value = pairs[at]
    luck = rng.random()
    if luck < 0.6:
        pairs[at] = key, kind, _other(kind, value, rng)
    elif luck < 0.7:
        del pairs[at]
    elif luck < 0.8:
        pairs[at] = key, 4, int(rng.integers(0, 70))
    else:
        name = KEYS[int(rng.integers(len(KEYS)))]
        new: Pair = (f"llama.{name}", STRING, WORDS[int(rng.integers(len(WORDS)))])
        pairs[:] = [p for p in pairs if p[0] != new[0]]
        pairs.append(new if name.endswith("type") else (new[0], 4, NEAR[int(rng.integers(len(NEAR)))]))


def _change_info(infos: list[Info], rng: np.random.Generator) -> None:
    at, other = (int(rng.integers(len(infos))) for _ in range(2))
    name, dims, kind, offset = infos[at]
    luck = rng.random()
    if luck < 0.3:
        i = int(rng.integers(len(dims)))
        dims = [*dims[:i], max(1, dims[i] + int(rng.integers(-2, 3))), *dims[i + 1 :]]
    elif luck < 0.5:
        dims = dims[::-1] if rng.random() < 0.5 else infos[other][1]
    elif luck < 0.7:
        kind = TYPES[int(rng.integers(len(TYPES)))]
    elif luck < 0.8:
        offset = infos[other][3]
    elif luck < 0.9:
        name, infos[other] = infos[other][0], (name, *infos[other][1:])
    else:
        name = name.replace("attn", "ffn") if rng.random() < 0.5 else name.replace("weight", "bias")
    infos[at] = name, dims, kind, offset


def changed(raw: bytes, rng: np.random.Generator) -> bytes:
    """`raw` with one to three entries of its header changed, and written anew with sound lengths and counts."""
    header = Reader(raw)
    data = raw[-(-header.at // 32) * 32 :]
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.6 and header.pairs:
            _change_pair(header.pairs, rng)
        else:
            _change_info(header.infos, rng)
    return written(header.pairs, header.infos, data)
