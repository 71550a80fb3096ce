"""GGUF files of models that draft for another (Gemma 4's assistants): what they are made of, and how they are read
back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.model.describe import open_model
from quire.model.disk.assistant_headers import open_assistant
from quire.model.disk.checkpoint import resolve
from quire.model.disk.claim import Claim
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_assistant import DRAFTING, KINDS, OUT, AssistantFile
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.gguf_names import NEXTN
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.hf_config import read_json
from quire.model.draft_sizes import AssistantSizes
from quire.model.families.assistants import ASSISTANTS, read_assistant
from quire.model.spec import ModelSpec
from quire.store.hub import NEWEST

UNGROUPED = "GGUF has no clusters of tokens: all tokens are scored, which changes drafts and no answer"


def is_assistant(model: str) -> bool:
    """Whether `model` is a folder of a model that drafts for another."""
    path = resolve(model) / "config.json"
    return path.is_file() and read_json(path).get("model_type") in ASSISTANTS


def open_source(model: str) -> ModelHeaders:
    """Headers of what a file is to be made of: a model, or one that drafts for another. `ModelError` as of both."""
    if not is_assistant(model):
        return open_model(model)
    opened = without_clusters(open_assistant(model, NEWEST))
    return replace(opened, spec=without_values(opened.spec))


def without_clusters(opened: ModelHeaders) -> ModelHeaders:
    """`opened` as files have it, whose table of tokens is multiplied with; a note says what is left out."""
    sizes = opened.spec.assistant
    if not sizes.clusters:
        return opened
    parts = {
        ("head" if role == "embed" else role, place): found
        for (role, place), found in opened.claim.parts.items()
        if role != "centroids"
    }
    spec = replace(opened.spec, tied_head=False, assistant=AssistantSizes(sizes.width))
    return replace(opened, spec=spec, claim=Claim(parts), notes=(*opened.notes, UNGROUPED))


def without_values(spec: ModelSpec) -> ModelSpec:
    """`spec` without what it says of matrices of values, of which such models have none."""
    return replace(spec, sizes=tuple(replace(size, keys_as_values=False) for size in spec.sizes))


def drafting_architecture(spec: ModelSpec) -> tuple[str, Architecture]:
    """GGUF's name of a model that drafts for another, and how its reader takes it."""
    ((name, found),) = DRAFTING.items()
    assert spec.family in ASSISTANTS and name in KINDS, "one architecture is of all of them"
    return name, found


def drafting_facts(arch: str, spec: ModelSpec) -> dict[str, Any]:
    """Keys that say that all layers draft, and for rows of which width."""
    return {f"{arch}.{OUT}": spec.assistant.width, f"{arch}.{NEXTN}": spec.layers} if spec.assistant.width else {}


def read_back(path: Path, drafts: bool) -> ModelSpec:
    """Facts of the file `path`, which `drafts` for another model or not, as its reader takes them."""
    if not drafts:
        return GgufModel.open(path).read_spec()[0]
    file = AssistantFile.open(path, DRAFTING)
    spec, family, _ = read_assistant(file.raw(), str(path))
    return without_values(file.as_stored(spec, family)[0])
