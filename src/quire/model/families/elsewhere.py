"""Model types that transformers has and architectures that llama.cpp has, and why those that do not run here do not.

The lists lie in elsewhere.json, written by scripts/models_elsewhere.py, so that neither program is needed to say it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quire.model.families.multimodal import MULTIMODAL, REFUSED
from quire.model.families.table import FAMILIES

SLOWLY = "its folder runs by the code of an installed transformers, slowly (pip install 'quire[transformers]')"
HERE = (*FAMILIES, *MULTIMODAL)


class Causal(NamedTuple):
    """A causal model type of transformers: its class, and what in its source is against running it ("": nothing)."""

    code: str
    why: str


class Converted(NamedTuple):
    """An architecture of GGUF files: model types whose folders become such files, and whether it makes no text."""

    types: tuple[str, ...]
    encoder: bool


@cache
def _told() -> Any:
    """What the file holds: {"transformers": {version, types}, "llama.cpp": {version, architectures}}."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def version_of(program: str) -> str:
    """The version of "transformers" or "llama.cpp" that the lists are of."""
    return str(_told()[program]["version"])


@cache
def causal_types() -> dict[str, Causal]:
    """The causal model types of transformers."""
    return {name: Causal(facts["class"], facts["why"]) for name, facts in _told()["transformers"]["types"].items()}


@cache
def architectures() -> dict[str, Converted]:
    """The architectures of llama.cpp."""
    found = _told()["llama.cpp"]["architectures"].items()
    return {name: Converted(tuple(facts["types"]), facts["encoder"]) for name, facts in found}


def why_no_row(model_type: str) -> str:
    """Why a model type that has no row does not run, or how it does; "" where nothing is known of it."""
    if model_type in REFUSED:
        return REFUSED[model_type]
    known = causal_types().get(model_type)
    if known is None:
        return ""
    return f"the code of transformers cannot run here: {known.why}" if known.why else SLOWLY


def why_no_gguf(architecture: str) -> str:
    """Why GGUF files of an architecture without a row are not read, and what to give instead; "" where unknown."""
    known = architectures().get(architecture)
    if known is None:
        return ""
    if known.encoder:
        return "it makes vectors or is an encoder, and of those no GGUF file is read; give the original folder"
    plain = architecture.replace("-", "").replace("_", "")
    folders = [name for name in HERE if name in known.types or name.replace("_", "") == plain]
    if folders:
        return f"nobody has said yet what its tensors are called; its folders run (model_type {', '.join(folders)})"
    slow = [name for name in known.types if why_no_row(name) == SLOWLY]
    if slow:
        return (
            f"GGUF files cannot run by the code of transformers; a folder of model_type {', '.join(slow)} can, slowly"
        )
    reasons = [f"{name}: {why}" for name in known.types if (why := why_no_row(name))]
    return reasons[0] if reasons else "no row is for its family, and transformers has no code for it"
