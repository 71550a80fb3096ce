"""Every family in one table: what loads, where it was checked, how fast it was here, and why the others do not load."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.families.elsewhere import (
    LACKS,
    architectures,
    causal_types,
    runs_slowly,
    version_of,
    why_no_gguf,
    why_no_row,
)
from quire.model.families.multimodal import MULTIMODAL, REFUSED
from quire.model.families.table import FAMILIES
from quire.store.catalog import catalog
from words import escaped, table

ROOT = Path(__file__).parents[2]
PULLED = {
    "e5-mistral": "mistral", "ernie4.5": "ernie4_5", "gemma2": "gemma2", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss",
    "gpt2": "gpt2", "granite3.3": "granite", "hermes3": "llama", "llama3.1": "llama", "llama3.2": "llama",
    "llama3.3": "llama", "mistral": "mistral", "mistral-nemo": "mistral", "olmo2": "olmo2", "phi3.5": "phi3",
    "phi4": "phi3", "phi4-mini": "phi3", "qwen2.5": "qwen2", "qwen2.5-coder": "qwen2", "qwen2.5vl": "qwen2_5_vl",
    "qwen3-coder": "qwen3_moe", "qwen3-embedding": "qwen3", "qwq": "qwen2", "smollm2": "llama", "smollm3": "smollm3",
    "tinyllama": "llama", "zephyr": "mistral",
}  # fmt: skip
"""Name in the catalog before the colon -> model type; Qwen3's mixtures are told by their sizes."""
SHAPES = {"llama-1b": "llama", "qwen-0.6b": "qwen3", "olmoe-like": "olmoe", "qwen-30b-a3b": "qwen3_moe"}
"""Shape in the measurements -> model type."""
MEASURED = (("peers_zen4.json", "q4_k_m"), ("peers_zen5.json", "q4_0"))
PARTS = ROOT / "tests" / "model" / "families" / "test_text_parts.py"
SIZE = re.compile(r"\d+(?:\.\d+)?[bm](?:-a\d+(?:\.\d+)?b)?")


def counts() -> str:
    """How many load, and how many do not."""
    here, slow, none = _types()
    files = [name for name in architectures() if name not in ARCHITECTURES]
    alone = text_alone()
    slow, none = ([name for name in names if name not in alone] for names in (slow, none))
    return (
        f"**{len(here)} model types load**, {len(MULTIMODAL)} of them with images, {len(alone)} more for text alone, "
        f"and {len(slow)} run slowly by the code of transformers. **{len(ARCHITECTURES)} GGUF architectures load.** "
        f"{len(none)} model types of transformers {version_of('transformers')} and {len(files)} architectures of "
        f"llama.cpp (that {version_of('llama.cpp')}) do not."
    )


def every_family() -> str:
    """A row for each model type and each architecture."""
    here, slow, none = _types()
    alone = text_alone()
    slow, none = ([name for name in names if name not in alone] for names in (slow, none))
    rows = [_loaded(name) for name in here]
    where = f"`{PARTS.name}`"
    rows += [_row(name, "folder", "for text", "", "", where, "", REFUSED.get(name, "")) for name in alone]
    rows += [_gguf(name) for name in sorted(ARCHITECTURES)]
    rows += [_row(name, "folder", "slowly", "", "", _checked(name), "", why_no_row(name)) for name in slow]
    rows += [_row(name, "folder", "no", "", "", "", "", why_no_row(name)) for name in none]
    left = sorted(name for name in architectures() if name not in ARCHITECTURES)
    rows += [_row(name, "GGUF", "no", "", "", "", "", why_no_gguf(name)) for name in left]
    return table(("name", "of", "runs", "other form", "sizes", "checked in", "tokens/s here", "why not"), rows)


def text_alone() -> tuple[str, ...]:
    """Model types of which the decoder runs, as the test of them lists them."""
    for node in ast.parse(PARTS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUN":
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{PARTS} has no RUN")


def _types() -> tuple[list[str], list[str], list[str]]:
    """Model types that load, those that run by transformers' code, and those that do not run."""
    here = sorted({*FAMILIES, *MULTIMODAL})
    rest = sorted({*causal_types(), *REFUSED, *LACKS} - {*here})
    slow = [name for name in rest if runs_slowly(name)]
    return here, slow, [name for name in rest if name not in slow]


def _row(name: str, of: str, runs: str, other: str, sizes: str, where: str, speed: str, why: str) -> tuple[str, ...]:
    return f"`{name}`", of, runs, other, sizes, where, speed, escaped(why)


def _loaded(name: str) -> tuple[str, ...]:
    files = ", ".join(f"`{arch}`" for arch, found in ARCHITECTURES.items() if name in found.rows)
    runs = "yes, with images" if name in MULTIMODAL else "yes"
    return _row(name, "folder", runs, files, _sizes().get(name, ""), _checked(name), _speeds().get(name, ""), "")


def _gguf(name: str) -> tuple[str, ...]:
    rows = ARCHITECTURES[name].rows
    speed = next((_speeds()[row] for row in rows if row in _speeds()), "")
    return _row(name, "GGUF", "yes", ", ".join(f"`{row}`" for row in rows), "", _checked(name, "gguf"), speed, "")


@cache
def _tables() -> dict[Path, tuple[set[str], set[str]]]:
    """The texts in the tests of models, by file: those that tables are of, and all of them."""
    paths = [*sorted((ROOT / "tests" / "support").glob("*.py")), *sorted((ROOT / "tests" / "model").rglob("*.py"))]
    paths += sorted((ROOT / "tests" / "gguf").glob("*.py"))
    found = {}
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        rows = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys if key is not None]
        rows += [node.elts[0] for node in nodes if isinstance(node, ast.Tuple) and node.elts]
        found[path] = _texts(rows), _texts(nodes)
    return found


def _texts(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


MODELS = ("variants", "paged_model", "image_families")
"""In the names of files whose tables are of models."""


def _checked(name: str, kind: str = "") -> str:
    """The file of the tests whose table has it, or else the first that names it."""

    def rank(path: Path) -> tuple[bool, bool, bool, str]:
        of_models = any(word in path.name for word in MODELS) or kind == "gguf"
        return ("gguf" in path.name) != (kind == "gguf"), not of_models, name not in _tables()[path][0], path.name

    found = [path for path, (_, texts) in _tables().items() if name in texts]
    return f"`{min(found, key=rank).name}`" if found else ""


@cache
def _sizes() -> dict[str, str]:
    """Sizes that `quire pull` knows, by model type."""
    found: dict[str, list[str]] = {}
    for name in catalog():
        base, _, rest = name.partition(":")
        size = SIZE.match(rest)
        kind = PULLED.get(base, "")
        if base == "qwen3":
            kind = "qwen3_moe" if rest.startswith(("30b", "235b")) else "qwen3"
        if size and kind and size[0] not in found.setdefault(kind, []):
            found[kind].append(size[0])
    return {kind: ", ".join(sizes) for kind, sizes in found.items()}


@cache
def _speeds() -> dict[str, str]:
    """Tokens a second of one stream, measured beside llama.cpp, by model type."""
    found: dict[str, str] = {}
    for file, form in MEASURED:
        rows = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if row["measure"] == "decode x1" and row["format"] == form and row["peer"] == "llama.cpp":
                found[SHAPES[row["shape"]]] = f"{row['quire_rate']:.0f} ({row['shape']}, {form})"
    return found
