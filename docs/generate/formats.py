"""Families, formats and methods that the code knows, from its own tables."""

from __future__ import annotations

import sys
from typing import get_args

import msgspec

from quire.compress.layouts.registry import LAYOUTS
from quire.compress.recipes.stages import METHODS
from quire.core.cache_config import KV_DTYPES
from quire.gguf.block_types import BLOCKS
from quire.gguf.encode import ENCODERS
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.families.table import FAMILIES
from quire.quant.gguf import TYPES
from quire.quant.registry import QUANTIZERS, READERS
from quire.text.messages.formats import TOOLS
from words import escaped, kind, table

KV_MEANINGS = {
    "auto": "as the weights",
    "bfloat16": "2 bytes a number",
    "float16": "2 bytes a number, computed in f32",
    "float32": "4 bytes a number",
    "int8": "1 byte a number, and an f32 scale for a token's key and value of each head",
    "fp8": "1 byte a number (E4M3), with the same scales",
}

HOW = {
    "int8": "Round to nearest, symmetric, a scale for each group of `--group-size` columns.",
    "int4": "Round to nearest, symmetric, a scale for each group, of several that are tried.",
    "nf4": "The 16 numbers of a normal distribution's quantiles (Dettmers et al. 2023), a scale for each group.",
    "mxfp4": "OCP microscaling 1.0: E2M1 codes, a power of two for each 32 columns.",
    "fp8": "E4M3, with fp8 activations, on GPUs that multiply fp8 (compute capability 8.9).",
}


def families() -> str:
    """Model types that have a row, and the GGUF architectures that are read as one."""
    gguf: dict[str, list[str]] = {}
    for name, found in ARCHITECTURES.items():
        for family in found.rows:
            gguf.setdefault(family, []).append(name)
    rows = [(f"`{name}`", ", ".join(f"`{a}`" for a in gguf.get(name, ()))) for name in sorted(FAMILIES)]
    return table(("`model_type` of config.json", "as GGUF: `general.architecture`"), rows)


def of_files() -> str:
    """Weight formats of checkpoints, by their `quant_method`."""
    rows = [
        (f"`{name}`", first_line(sys.modules[reader.__module__].__doc__), f"`{reader.__module__}`")
        for name, reader in READERS.items()
    ]
    return table(("`quant_method`", "what is read", "module"), rows)


def made_at_load() -> str:
    """What --quantization makes."""
    return table(("`--quantization`", "how"), [(f"`{name}`", HOW[name]) for name in QUANTIZERS])


def of_gguf() -> str:
    """Block types of GGUF: which are read, which are written."""
    rows = [
        (
            f"`{block.name}`",
            f"{block.nbytes * 8 / block.numbers:.4g}",
            yes(known(block.name)),
            yes(block.name in ENCODERS),
        )
        for block in BLOCKS.values()
    ]
    return table(("type", "bits a weight", "read", "written by `quire compress`"), rows)


def yes(found: bool) -> str:
    """A cell."""
    return "yes" if found else "-"


def known(name: str) -> bool:
    """Whether matrices of the type are read."""
    return name in TYPES or name in ("F32", "F16", "BF16")


def of_keys_and_values() -> str:
    """--kv-cache-dtype."""
    return table(("`--kv-cache-dtype`", "what it is"), ((f"`{name}`", KV_MEANINGS[name]) for name in KV_DTYPES))


def methods() -> str:
    """Stages of recipes with their options and defaults, and the layouts that they write."""
    parts = []
    for stage, found in METHODS.items():
        rows = [
            (f"`{name}`", escaped(" ".join((struct.__doc__ or "").split())), options(struct))
            for name, struct in found.items()
        ]
        parts.append(f"### {stage}\n\n{table(('method', 'what it does', 'options and defaults'), rows)}")
    layouts = ", ".join(f"`{name}`" for name in LAYOUTS)
    return "\n".join(
        [
            *parts,
            "### output\n",
            f"`output.layout` chooses the layout of a quantized model: {layouts}. By default, the method decides.\n",
        ]
    )


def options(struct: type[msgspec.Struct]) -> str:
    """`name` = default (type) of each field but the stage's own two."""
    shown = []
    for field in msgspec.structs.fields(struct):
        if field.name in ("kind", "method"):
            continue
        value = (
            "required" if field.required else f"`{field.default}`" if field.default is not msgspec.NODEFAULT else "none"
        )
        choices = kind(field.type)
        told = f" ({choices})" if "`" in choices and len(get_args(field.type)) < 20 else ""
        shown.append(f"`{field.name}` = {value}{told}")
    return "; ".join(shown)


def of_tools() -> str:
    """Formats of tool calls that are read and, where they must come, written by grammar."""
    rows = [(f"`{name}`", ", ".join(f"`{mark}`" for mark in found.openers)) for name, found in TOOLS.items()]
    return table(("`--tool-call-parser`", "a call begins with"), rows)


def first_line(text: str | None) -> str:
    """Of a docstring."""
    return escaped((text or "").strip().partition("\n\n")[0].replace("\n", " "))
