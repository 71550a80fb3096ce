"""What native ops are told beside their arrays: structs of csrc/descriptors.h, the same fields in the same order.

A call takes a descriptor as it takes an array, by its address; a recording keeps it as it keeps arrays. The fields are
explained there: arrays go in as addresses, 0 for none, and live as long as whoever filled them in, or `kept`, does.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int64
from typing import Any


class Descriptor(ctypes.Structure):
    """A struct at an address that stays as long as it lives. `kept`: what lives as long."""

    kept: Any

    @property
    def at(self) -> int:
        """Address of the struct."""
        return ctypes.addressof(self)

    def __index__(self) -> int:
        return ctypes.addressof(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and memoryview(self).tobytes() == memoryview(other).tobytes()

    def __hash__(self) -> int:
        return hash(memoryview(self).tobytes())


def words(*names: str) -> list[tuple[str, type[c_int64]]]:
    """Addresses and integers."""
    return [(name, c_int64) for name in names]


class CacheDescriptor(Descriptor):
    """Keys and values of a layer."""

    _fields_ = words("keys", "values", "kv_heads", "d", "block_size", "blocks", "format", "step")


class LatentCacheDescriptor(Descriptor):
    """Rotated keys and latents of a layer."""

    _fields_ = words("keys", "values", "rank", "rope", "block_size", "blocks", "bf16", "key_step", "value_step")


class BatchDescriptor(Descriptor):
    """The sequences of a step, and the blocks in which their keys lie."""

    _fields_ = words("cu_q", "context", "tables", "tree", "starts", "sequences", "max_blocks", "states")


class AttentionDescriptor(Descriptor):
    """Heads of queries and how they attend."""

    _fields_ = [
        *words("sinks", "alibi", "bias", "distances", "behind", "heads", "window", "after", "queries_only", "pool"),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class ConvolutionDescriptor(Descriptor):
    """The causal convolution of a layer."""

    _fields_ = words("weight", "bias", "taps", "width", "silu", "gated")


class RopeDescriptor(Descriptor):
    """How the heads of a layer are normed and turned."""

    _fields_ = [*words("table", "q_norm", "k_norm", "positions", "half", "heads"), ("eps", c_float)]


class SpansDescriptor(Descriptor):
    """Spans of a row's columns, each of which has a norm of its own."""

    _fields_ = [*words("weight", "start", "count", "span", "centered"), ("eps", c_float)]


class GatedNormDescriptor(Descriptor):
    """Rows that a gate multiplies, and the norm of their spans."""

    _fields_ = [*words("weight", "span", "weights", "sigmoid", "gate_first"), ("eps", c_float)]


class StateBatchDescriptor(Descriptor):
    """Which recurrent states a step reads and where it leaves them."""

    _fields_ = words("cu_q", "source", "counts", "target", "sequences")


class DeltaDescriptor(Descriptor):
    """A layer's gated delta rule."""

    _fields_ = [
        *words("a", "dt_bias", "key_heads", "value_heads", "key_dim", "value_dim"),
        ("lower_bound", c_float),
        ("beta_scale", c_float),
    ]


class ScanDescriptor(Descriptor):
    """A layer's selective scan."""

    _fields_ = [
        *words("a", "d", "dt_bias", "heads", "groups", "head_dim", "state", "selective"),
        ("low", c_float),
        ("high", c_float),
    ]


class PoolDescriptor(Descriptor):
    """How the rows of a layer become entries."""

    _fields_ = [*words("bias", "norm", "table", "positions", "half", "every", "series"), ("eps", c_float)]


class EntryReadsDescriptor(Descriptor):
    """How rows read the last tokens and entries before these."""

    _fields_ = [*words("sinks", "heads", "window", "every", "most"), ("scale", c_float)]


class RoutingDescriptor(Descriptor):
    """How a router chooses experts."""

    _fields_ = [
        *words("experts", "top_k", "score", "renormalize", "groups", "top_groups", "group_best"),
        ("scale", c_float),
        ("jitter", c_float),
    ]


class ExpertsDescriptor(Descriptor):
    """The matrices of a layer's experts."""

    _fields_ = words("matrices", "bias", "experts", "n")


class BetweenDescriptor(Descriptor):
    """What stands between the two matrices of an expert."""

    _fields_ = [
        *words("activation", "clamped"),
        *((name, c_double) for name in ("alpha", "limit", "shift", "most")),
    ]


class PairsDescriptor(Descriptor):
    """The pairs (token, choice) of a step, sorted by expert."""

    _fields_ = words("tokens", "places", "offsets", "weights", "room", "x_rows", "top_k")


class HomesDescriptor(Descriptor):
    """Who holds the experts of a layer."""

    _fields_ = words("ranks", "local", "experts", "copies", "held", "rank", "world", "idle")


class RoundingDescriptor(Descriptor):
    """Round-to-nearest quantization of rows of k columns."""

    _fields_ = words("divisors", "tries", "k", "stride", "group", "low", "high", "bits", "bf16")


class ReaderDescriptor(Descriptor):
    """How a stream reads its files."""

    _fields_ = words("threads", "piece", "cached")
