"""Model types that transformers has and architectures that llama.cpp has, and why those that do not run here do not.

The lists lie in elsewhere.json, written by scripts/models_elsewhere.py, so that neither program is needed to say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quire.model.families.assistants import ALONE, ASSISTANTS
from quire.model.families.multimodal import MULTIMODAL, REFUSED
from quire.model.families.table import FAMILIES

SLOWLY = "its folder runs by the code of an installed transformers, slowly (pip install 'quire[transformers]')"
HERE = (*FAMILIES, *MULTIMODAL)
LACKS: Mapping[str, str] = {
    "arctic": "experts beside the MLP that read what attention reads",
    "arwkv7": "shifts of tokens and a recurrence with decays of channels",
    "diffllama": "attention that takes one softmax from another",
    "doge": "a mask of keys that each layer computes, and experts chosen by products of keys",
    "inkling2_text": "a bias by distance that each query makes, and convolutions of what layers add",
    "inkling_text": "a bias by distance that each query makes, and convolutions of what layers add",
    "jetmoe": "experts of queries and of results in attention",
    "jev": "answers that are scores of labels behind marks; its decoder runs as a folder of its own",
    "mistral_large4": "a rope of learned frequencies, queries scaled for each head, and latents that layers share",
    "muse_spark_text": "a gate of what is added to the stream, and a norm of what each expert makes",
    "plamo2": "scans of heads whose time steps, B and C are made of what was convolved",
    "recurrent_gemma": "a linear recurrence of channels whose decays are gated by their inputs",
    "rwkv": "shifts of tokens and a recurrence of weighted values",
    "rwkv6": "shifts of tokens and a recurrence with decays of channels",
    "rwkv6qwen2": "shifts of tokens and a recurrence with decays of channels",
    "rwkv7": "shifts of tokens and a recurrence with decays of channels",
    "smallthinker": "routers that read what attention reads",
    "xlstm": "memories with exponential gates",
    "zamba": "scans of channels in heads of their own",
    "zaya": "convolutions of queries and keys, and routers that read those of the layer before",
}
"""Model types and architectures -> what a row of theirs would need that no family of the table has."""
BESIDE = ALONE.replace("FOLDER", "FILE")
DRAFTS = "it drafts for another model, and of those only folders are read"
DIFFUSES = "it fills in text from all sides at once, by diffusion, and here text is made from left to right"
SPEAKS = "it makes sound, which nothing here does"
VECTORS = "it is an encoder that has no row, as a file or as a folder"
UNTOLD: dict[str, str] = {
    **dict.fromkeys(("dflash", "eagle3"), DRAFTS),
    "gemma4-assistant": BESIDE,
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), DIFFUSES),
    **dict.fromkeys(("pockettts", "qwen3tts", "wavtokenizer-dec"), SPEAKS),
}
"""Architecture -> why it is not read, where its name and its folders do not tell."""


class Causal(NamedTuple):
    """A causal model type of transformers: its class, and what in its source is against running it ("": nothing)."""

    code: str
    why: str


class Converted(NamedTuple):
    """An architecture of GGUF files: model types whose folders become such files, and whether it makes no text."""

    types: tuple[str, ...]
    encoder: bool


def alike(name: str, known: Iterable[str]) -> str:
    """Which of `known` are spelled like `name`, and where all of them are listed."""
    near = get_close_matches(name, [*known], cutoff=0.75)
    listed = "docs/models/families.md names those that are"
    return f"there is {' and '.join(near)}; {listed}" if near else listed


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
    if model_type in ASSISTANTS:
        return ALONE
    if model_type in REFUSED:
        return REFUSED[model_type]
    known, said = causal_types().get(model_type), list[str]()
    if known is not None:
        said.append(f"the code of transformers cannot run here: {known.why}" if known.why else SLOWLY)
    if model_type in LACKS:
        said.append(f"a row lacks {LACKS[model_type]}")
    return "; ".join(said)


def runs_slowly(model_type: str) -> bool:
    """Whether a model type that has no row runs by the code of transformers."""
    return model_type not in REFUSED and model_type in causal_types() and not causal_types()[model_type].why


def why_no_gguf(architecture: str) -> str:
    """Why GGUF files of an architecture without a row are not read, and what to give instead; "" where unknown."""
    known = architectures().get(architecture)
    if known is None:
        return ""
    if architecture in UNTOLD:
        return UNTOLD[architecture]
    if known.encoder:
        return VECTORS
    plain = architecture.replace("-", "").replace("_", "")
    folders = [name for name in HERE if name in known.types or name.replace("_", "") == plain]
    if folders:
        return f"nobody has said yet what its tensors are called; its folders run (model_type {', '.join(folders)})"
    slow = [name for name in known.types if runs_slowly(name)]
    if slow:
        return (
            f"GGUF files cannot run by the code of transformers; a folder of model_type {', '.join(slow)} can, slowly"
        )
    reasons = [f"{name}: {why}" for name in known.types if (why := why_no_row(name))]
    lacks = f"; a row lacks {LACKS[architecture]}" if architecture in LACKS else ""
    return reasons[0] if reasons else f"no row is for its family{lacks}"
