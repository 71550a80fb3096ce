"""What quire writes, for the tools to read: a tiny model in every layout, below a folder for each tool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tiny import VOCABULARY, write_model

from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import recipe_of

ROWS, LENGTH = 16, 64


def quantize(method: str, layout: str = "auto", **options: Any) -> dict[str, Any]:
    """Tables of a recipe of one stage."""
    return {"stage": [{"kind": "quantize", "method": method, **options}], "output": {"layout": layout}}


def gptq(bits: int = 4, group_size: int = 64, layout: str = "gptq", **options: Any) -> dict[str, Any]:
    """GPTQ in a layout of its tools."""
    return quantize("gptq", layout, bits=bits, group_size=group_size, **options)


PRUNED = {"kind": "prune", "method": "magnitude", "pattern": "2:4"}
COMPRESSED = "compressed-tensors"
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llmcompressor": {
        **{f"rtn{bits}": quantize("rtn", bits=bits, group_size=64) for bits in (2, 3, 4, 8)},
        "rtn4_asymmetric": quantize("rtn", bits=4, group_size=32, symmetric=False),
        "rtn8_rows": quantize("rtn", bits=8, group_size=-1),
        "gptq4": quantize("gptq", COMPRESSED, bits=4, group_size=64),
        "awq4": quantize("awq", COMPRESSED, group_size=64),
        "smoothquant": quantize("smoothquant"),
        **{f"fp8_{scales}": quantize("fp8", scales=scales) for scales in ("dynamic", "static", "block")},
        "mxfp4": quantize("mxfp4"),
        "mixed": quantize("mixed", bits_per_weight=4.5, group_size=64, choices=[3, 4, 8]),
        **{f"{kv}_cache": quantize("rtn", group_size=64, kv=kv) for kv in ("fp8", "int8")},
        "pruned": {"stage": [PRUNED, *quantize("gptq", group_size=64)["stage"]], "output": {"layout": COMPRESSED}},
    },
    "gptqmodel": {
        **{f"gptq{bits}": gptq(bits) for bits in (2, 3, 4, 8)},
        "gptq4_asymmetric": gptq(symmetric=False, layout="gptq_v2"),
        "gptq4_act_order": gptq(static_groups=False),
        "gptq4_rows": gptq(group_size=-1),
        "rtn4": quantize("rtn", "gptq", bits=4, group_size=64),
        "mixed": quantize("mixed", "gptq", bits_per_weight=4.5, group_size=64, choices=[3, 4, 8]),
        "awq4": quantize("awq", group_size=64),
    },
    "autoawq": {
        "awq4": quantize("awq", group_size=64),
        "awq4_symmetric": quantize("awq", group_size=128, symmetric=True),
        "rtn4": quantize("rtn", "awq", bits=4, group_size=64),
    },
    "bitsandbytes": {
        "nf4": quantize("nf4", double_quantization=False),
        "nf4_double": quantize("nf4"),
        "nf4_blocks": quantize("nf4", block_size=128),
        "llm_int8": quantize("llm_int8"),
    },
}
"""Tool that reads -> case -> tables of the recipe."""


def write_cases(tool: str, out: Path) -> None:
    """Write each case that `tool` is to read into the folder OUT/CASE."""
    source = write_model(out / "source")
    numbers = random.Random(5)
    text = out / "text.txt"
    text.write_text(" ".join(str(numbers.randrange(3, VOCABULARY)) for _ in range(4 * ROWS * LENGTH)))
    calibration = {"files": [str(text)], "samples": ROWS, "length": LENGTH}
    for case, tables in CASES[tool].items():
        recipe = recipe_of({"calibration": calibration, **tables}, f"{tool} {case}")
        compress(str(source), out / "cases" / case, recipe, lambda _: None)
