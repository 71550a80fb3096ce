"""What the files of a model that does not load say of themselves: from headers, and without a row that reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.gguf.file import GgufFile, kind_of
from quire.gguf.mmproj import KIND as MMPROJ
from quire.gguf.mmproj import Mmproj
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.disk.gguf_tensors import GgufTensors, open_files
from quire.model.disk.hf_config import read_json
from quire.model.families.elsewhere import HERE, SLOWLY, why_no_row
from quire.model.nearest import nearest_architecture, nearest_family
from quire.model.transformers_backend.source_facts import package

Rows = list[tuple[str, str]]
ROW = "a row of its own would run it: docs/extend/family.md says how"
KINDS = {
    "mmproj": (
        "what makes rows of images for a model of text",
        "it is no model; name the model's own file, and this one by --mmproj",
    ),
    "imatrix": ("statistics of activations (llama-imatrix)", "no model; quire compress takes it: --set imatrix=FILE"),
    "adapter": ("a low-rank adapter", "name the folder it was made of (adapter_config.json) as --lora-modules"),
    "vocab": ("a vocabulary without weights", "it is no model; name one with weights"),
}  # fmt: skip
"""Kinds of GGUF files that are no models of text: what they hold, and what to do."""
SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count"),
    "hidden": ("hidden_size", "n_embd", "d_model", "embedding_length"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "attention.head_count"),
    "key/value heads": ("num_key_value_heads", "attention.head_count_kv"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "expert_count"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "context_length"),
    "vocabulary": ("vocab_size",),
}
"""What is shown -> how config.json or GGUF's metadata may call it."""


@dataclass(frozen=True)
class Outline:
    """`rows`: what the files say. `nearest`: the row that fits best, "" where the model's own is there. `remedy`: what
    to do."""

    rows: Rows
    nearest: str
    remedy: str


def outline(path: Path) -> Outline | None:
    """The outline of a model's folder or GGUF file; None where nothing of it can be read."""
    with suppress(ModelError, OSError, ValueError):
        return _of_gguf(path) if path.is_file() else _of_folder(path)
    return None


def outline_of_config(raw: Mapping[str, Any], where: str) -> Outline:
    """The outline of a model of which config.json alone is here."""
    kind = str(raw.get("model_type"))
    near = "" if kind in HERE else nearest_family(kind, raw, None).said
    return Outline([("config", where), *_config_rows(raw)], near, _remedy(kind))


def _of_folder(folder: Path) -> Outline:
    raw = read_json(folder / "config.json")
    source = Checkpoint(folder)
    kind = str(raw.get("model_type"))
    dtypes = Counter[str]()
    for info in source.infos.values():
        dtypes[str(info.dtype)] += info.numbers
    rows = [("folder", str(folder)), *_config_rows(raw), *_parameter_rows(dtypes, len(source.infos))]
    near = "" if kind in HERE else nearest_family(kind, raw, source).said
    return Outline(rows, near, _remedy(kind))


def _remedy(model_type: str) -> str:
    if model_type in HERE:
        return "the reason above says what; the row for this model type is there"
    why = why_no_row(model_type)
    if why == SLOWLY and package() is not None:  # which was asked, and the reason above is its answer
        why = ""
    return f"{why}; {ROW}" if why else ROW


def _config_rows(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model type", str(raw.get("model_type"))
    if isinstance(names := raw.get("architectures"), list):
        yield "classes", ", ".join(map(str, names))
    inner = raw.get("text_config")
    yield from _sizes({**raw, **(inner if isinstance(inner, dict) else {})}, "")


def _sizes(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for shown, names in SIZES.items():
        value = next((facts[prefix + name] for name in names if facts.get(prefix + name) is not None), None)
        if isinstance(value, np.ndarray):
            yield shown, f"{value.min():,} to {value.max():,}, by layer"
        elif type(value) is int:
            yield shown, f"{value:,}"


def _parameter_rows(types: Counter[str], tensors: int) -> Rows:
    total = sum(types.values())
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in types.most_common())
    return [("parameters", f"{total:,} in {tensors} tensors"), ("types", shares or "none")]


def _of_gguf(path: Path) -> Outline:
    files = open_files(path)
    file, held = files[0], kind_of(path)
    name = str(file.metadata.get("general.architecture"))
    types = Counter[str]()
    for each in files:
        for tensor in each.tensors.values():
            types[tensor.type.name] += prod(tensor.shape)
    what, remedy = KINDS.get(held, ("a model", ROW))
    rows = [("file", str(path)), ("holds", what), ("architecture", name), *_general_rows(file)]
    rows += _projector_rows(file) if held == MMPROJ else []
    rows += [*_sizes(file.metadata, "clip.vision." if held == MMPROJ else f"{name}."), *_vocabulary_rows(file)]
    rows += _parameter_rows(types, sum(len(each.tensors) for each in files))
    rows += [("files", str(len(files)))] if len(files) > 1 else []
    if held in KINDS:
        return Outline(rows, "", remedy)
    if name in ARCHITECTURES:
        return Outline(rows, "", "the reason above says what; the architecture itself is read")
    return Outline(rows, nearest_architecture(name, GgufTensors(files)).said, remedy)


def _projector_rows(file: GgufFile) -> Iterator[tuple[str, str]]:
    """What a mmproj file belongs to, and whether it is read."""
    metadata = file.metadata
    kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    yield "projector", str(kind)
    try:
        models = ", ".join(Mmproj.open(file.path).row.texts)
    except ModelError as error:
        yield "is read", f"no: {error.message.removeprefix(f'{file.path}: ')}"
        return
    yield "belongs to", f"a model of {models}, with rows of {metadata.get('clip.vision.projection_dim')} numbers"


def _general_rows(file: GgufFile) -> Iterator[tuple[str, str]]:
    for key, shown in (("name", "name"), ("size_label", "size"), ("license", "license")):
        value = file.metadata.get(f"general.{key}")
        if isinstance(value, str):
            yield shown, f"{value:.200}"


def _vocabulary_rows(file: GgufFile) -> Iterator[tuple[str, str]]:
    if (count := file.metadata.count("tokenizer.ggml.tokens")) is not None:
        kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        yield "vocabulary", f"{count:,} tokens, {' '.join(str(kind) for kind in kinds if kind)}"
        yield "chat template", "in the file" if "tokenizer.chat_template" in file.metadata else "none"
