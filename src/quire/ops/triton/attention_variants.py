"""Launches of the attention kernels that `benchmarks/compile_kernels.py` compiles, in their sizes for any device."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from quire.ops.triton.attention_kernels import FP8_BITS, FP8_NATIVE, INT8, PLAIN, merge_kernel, split_kernel
from quire.ops.triton.chunk_kernels import chunk_kernel
from quire.ops.triton.variants import Variant

POINTERS = {
    "part_acc": "*fp32",
    "part_ml": "*fp32",
    "cu_q": "*i32",
    "context": "*i32",
    "tables": "*i32",
    "slopes": "*fp32",
    "sinks": "*fp32",
    "tree": "*i64",
}
NUMBERS = (
    "window", "row_step", "rotated_step", "rotated_width", "table_step", "block_step", "head_step", "heads", "splits",
    "parts", "sequences",
)  # fmt: skip
ALIGNED = ("qkv", "out", "rotated", "keys", "values", "part_acc", "part_ml", "row_step", "rotated_step", "block_step",
           "head_step", "rotated_width")  # fmt: skip
NOTHING = (False,) * 4
WINDOW, CAPPED = (True, False, False, False), (True, True, False, False)
SLOPES, TREE = (False, False, True, False), (False, False, False, True)


def variant(
    name: str, kernel: Any, sizes: dict[str, int], cache: str = "*bf16", kind: Any = PLAIN,
    spec: tuple[bool, ...] = NOTHING, group: int = 4, r: int = 0,
) -> Variant:  # fmt: skip
    """A launch over bf16 rows; `sizes` holds D, BM, BN, warps and stages, `spec` what scores have."""
    scales = "*fp32" if cache == "*u8" else cache
    types = dict.fromkeys(NUMBERS, "i32") | POINTERS | dict.fromkeys(("qkv", "out", "rotated"), "*bf16")
    types |= {"keys": cache, "values": cache, "key_scales": scales, "value_scales": scales}
    types |= dict.fromkeys(("factor", "cap"), "fp32")
    constants: dict[str, Any] = {
        "D": sizes["D"], "BD": sizes["D"], "SIZE": 16, "GROUP": group, "TILE_HEADS": min(group, sizes["BM"]),
        "BM": sizes["BM"], "BN": sizes["BN"], "R": r, "SPLIT": 512, "SPEC": spec,
        "DOT": tl.float32 if cache == "*fp32" else tl.bfloat16, "KIND": kind.value, "SINGLE": False, "BH": 1,
    }  # fmt: skip
    for argument, given in (("slopes", spec[2]), ("tree", spec[3]), ("sinks", spec == WINDOW), ("rotated", r > 0)):
        if not given:
            constants[argument] = None
    known = kernel.arg_names
    return Variant(
        name,
        kernel,
        {argument: types[argument] for argument in known if argument not in constants},
        {argument: value for argument, value in constants.items() if argument in known},
        sizes["warps"],
        sizes["stages"],
        tuple(argument for argument in ALIGNED if argument in known and argument not in constants),
        ("sm_90",) if kind == FP8_NATIVE else (),
    )


def sized(d: int, bm: int, bn: int, warps: int, stages: int) -> dict[str, int]:
    """The sizes of a launch by name."""
    return {"D": d, "BM": bm, "BN": bn, "warps": warps, "stages": stages}


VARIANTS = [
    variant("attention split, bf16, head 128", split_kernel, sized(128, 64, 64, 4, 2)),
    variant("attention split, bf16, head 64", split_kernel, sized(64, 64, 64, 4, 2)),
    variant("attention split, bf16, head 256", split_kernel, sized(256, 32, 64, 8, 2)),
    variant("attention split, f32, head 128", split_kernel, sized(128, 32, 32, 4, 2), "*fp32"),
    variant("attention split, int8, head 128", split_kernel, sized(128, 64, 64, 4, 2), "*u8", INT8),
    variant("attention split, fp8 by integers, head 128", split_kernel, sized(128, 64, 64, 4, 2), "*u8", FP8_BITS),
    variant("attention split, fp8 on sm_90, head 128", split_kernel, sized(128, 64, 64, 4, 2), "*u8", FP8_NATIVE),
    variant("attention split, window and cap", split_kernel, sized(128, 64, 64, 4, 2), spec=CAPPED),
    variant("attention split, window and sinks", split_kernel, sized(64, 64, 64, 4, 2), spec=WINDOW),
    variant("attention split, slopes", split_kernel, sized(64, 64, 64, 4, 2), spec=SLOPES),
    variant("attention split, tree", split_kernel, sized(128, 64, 64, 4, 2), spec=TREE),
    variant("attention chunk, bf16, head 128", chunk_kernel, sized(128, 128, 64, 8, 2)),
    variant("attention chunk, bf16, head 64", chunk_kernel, sized(64, 128, 64, 8, 2)),
    variant("attention chunk, bf16, head 256", chunk_kernel, sized(256, 32, 64, 8, 2)),
    variant("attention chunk, fp8 on sm_90, head 128", chunk_kernel, sized(128, 128, 64, 8, 2), "*u8", FP8_NATIVE),
    variant("attention chunk, window and cap", chunk_kernel, sized(128, 128, 64, 8, 2), spec=CAPPED),
    variant("attention chunk, window and sinks", chunk_kernel, sized(64, 128, 64, 8, 2), spec=WINDOW),
    variant("attention chunk, slopes", chunk_kernel, sized(64, 128, 64, 8, 2), spec=SLOPES),
    variant("attention chunk, tree", chunk_kernel, sized(128, 128, 64, 8, 2), spec=TREE),
    variant("attention merge, head 128", merge_kernel, sized(128, 64, 64, 1, 2)),
    variant("latent attention split, rank 512", split_kernel, sized(512, 32, 16, 8, 2), group=16, r=64),
    variant("latent attention chunk, rank 512", chunk_kernel, sized(512, 32, 16, 8, 2), group=16, r=64),
    variant("latent attention merge, rank 512", merge_kernel, sized(512, 32, 32, 4, 2), group=16),
]
