"""Launches of the row-wise and cache kernels that `benchmarks/compile_kernels.py` compiles, for 8 B parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.ops.triton import cache_kernels, rowwise_kernels
from quire.ops.triton.variants import Variant

ROWS = ("x", "out", "delta", "gate_up", "y", "q", "kv", "qkv", "part", "table", "keys", "values")
NUMBERS = {"d": "i32", "f": "i32", "count": "i32", "k": "i32", "n": "i32", "width": "i32", "start": "i32",
           "rank": "i32", "slots": "i32", "words": "i32", "heads": "i32", "block_step": "i32", "head_step": "i32",
           "vocabulary": "i32", "offset": "i32"}  # fmt: skip
TYPES = dict.fromkeys(ROWS, "*bf16") | NUMBERS | {
    "weight": "*fp32", "norm": "*fp32", "q_norm": "*fp32", "k_norm": "*fp32", "h": "*fp32", "a": "*fp32", "b": "*fp32",
    "slots_of": "*i32", "rows": "*i32", "positions": "*i32", "numbers": "*i32", "eps": "fp32", "most": "fp32",
    "number": "fp32", "addresses": "*i64", "pairs": "*i64",
}  # fmt: skip
UNALIGNED = ("start", "rank", "count", "vocabulary", "offset", "eps", "most", "number", "slots")
HEADS = {"HEADS": 32, "KV": 8, "D": 128, "HALF": 64, "HB": 64, "RB": 1, "SIZE": 16, "BH": 8}


def variant(
    name: str, kernel: Any, constants: dict[str, Any], types: Mapping[str, str] = MappingProxyType({}), warps: int = 4
) -> Variant:
    """A launch whose arguments have the usual types except `types`."""
    known = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {argument: types.get(argument, TYPES.get(argument, "i32")) for argument in known}
    aligned = tuple(argument for argument in known if argument not in UNALIGNED)
    return Variant(name, kernel, signature, constants, warps, 3, aligned)


ROPE = {"table": "*fp32", "slots": "*i64"}
NO_NORMS = HEADS | {"q_norm": None, "k_norm": None}
SCALED = ROPE | {"keys": "*u8", "values": "*u8", "key_scales": "*fp32", "value_scales": "*fp32"}
PLAIN = ROPE | {"key_scales": "*bf16", "value_scales": "*bf16"}
TILE = {"BM": 16, "BR": 16, "PRECISION": "tf32"}
VARIANTS = [
    variant("add_rmsnorm", rowwise_kernels.norm_kernel, {"bias": None, "BD": 4096, "CENTERED": False}, warps=8),
    variant("norm_spans", rowwise_kernels.spans_kernel, {"BR": 32, "BS": 128, "CENTERED": False}, warps=8),
    variant("gated_activation", rowwise_kernels.gated_kernel, {"BF": 1024, "KIND": 0}),
    variant("gelu", rowwise_kernels.activation_kernel, {"BLOCK": 1024, "KIND": 1}),
    variant("softcap", rowwise_kernels.change_kernel, {"BLOCK": 1024, "KIND": 1}),
    variant("embedding", rowwise_kernels.embedding_kernel, {"BD": 1024, "ADD": False}),
    variant("take_rows", rowwise_kernels.take_kernel, {"BD": 1024}, {"out": "*fp32"}),
    variant("lora shrink", rowwise_kernels.shrink_kernel, TILE | {"BK": 128}),
    variant("lora expand", rowwise_kernels.expand_kernel, TILE | {"BN": 128}),
    variant("rope and cache, bf16", cache_kernels.rope_kernel, NO_NORMS | {"KIND": 0}, PLAIN),
    variant("rope and cache, int8, norms", cache_kernels.rope_kernel, HEADS | {"KIND": 1}, SCALED),
    variant("rope and cache, fp8, norms", cache_kernels.rope_kernel, HEADS | {"KIND": 2}, SCALED),
    variant("latent rope and cache", cache_kernels.latent_rope_kernel,
            {"R": 64, "RANK": 512, "BRANK": 512, "HB": 32, "SIZE": 16, "BH": 8}, ROPE),
    variant("copy_blocks", cache_kernels.copy_kernel, {"BLOCK": 1024}),
]  # fmt: skip
