"""What stands behind the pooled rows of a model folder, as a GGUF file has it: the inverse of `gguf_pooling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.core.errors import ConfigError
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import POOLED, TYPES_OF_TOKENS
from quire.model.disk.gguf_pooling import CLASSES, KINDS, NORM
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.pooling_config import BY_TOKENS
from quire.model.load.classifier import load_classifier

Tensors = dict[str, np.ndarray[Any, Any]]
OF_KIND = {ours: number for number, ours in KINDS.items()}


def check_dense(opened: ModelHeaders) -> None:
    """`ConfigError` for a model of sparse vectors, of whose head some parts may have names in the format."""
    if opened.pooling.kind == "splade":
        raise ConfigError(f"{opened.folder}: SPLADE's head and pooling have no place in GGUF; keep the folder")


def pooled_tensors(opened: ModelHeaders, own: Architecture) -> Tensors:
    """The matrices and vectors behind pooled rows, f32 by their names; `ConfigError` where the format has no place for
    one."""
    pooling, found = opened.pooling, Tensors()
    steps = () if opened.config.texts(BY_TOKENS) else load_classifier(opened)
    if not steps:
        return found
    names = own.head if pooling.labels else own.dense
    if not names or (len(steps) > len(names) if pooling.labels else len(steps) not in (0, len(names))):
        what = "classes" if pooling.labels else f"{len(steps)} dense layers behind the pooled row"
        raise ConfigError(f"{opened.folder}: files of its architecture have no place for its {what}; keep the folder")
    if pooling.several and len(pooling.labels) > 1:
        raise ConfigError(f"{opened.folder}: several of its classes may hold at one time, which GGUF cannot say")
    if pooling.labels and not opened.spec.bidirectional:
        raise ConfigError(
            f"{opened.folder}: classes of a decoder are not written; llama.cpp takes softmax of all of them"
        )
    for name, step in zip(names[-len(steps) :], steps, strict=True):
        found[f"{name}.weight"] = step.weight
        if step.bias is not None:
            found[f"{name}.bias"] = step.bias
        if step.norm is not None:
            found[f"{NORM}.weight"] = step.norm.weight
        if pooling.labels and step.activation not in ("", own.bend):
            raise ConfigError(f"{opened.folder}: readers of GGUF take {own.bend} before classes, not {step.activation}")
        if not pooling.labels and (step.activation or step.bias is not None):
            raise ConfigError(f"{opened.folder}: a dense layer has a bias or an activation, which GGUF cannot hold")
        if step.norm is not None and step.norm.bias is not None:
            raise ConfigError(f"{opened.folder}: the norm before its classes has a bias, which GGUF cannot hold")
    return {name: np.ascontiguousarray(tensor, "<f4") for name, tensor in found.items()}


def pooled_facts(opened: ModelHeaders, own: Architecture, prefix: str, behind: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of how vectors or classes are made, by their whole keys; empty for a model that makes text alone."""
    pooling, spec = opened.pooling, opened.spec
    found: dict[str, Any] = {}
    if spec.bidirectional:
        found[TYPES_OF_TOKENS] = max(1, spec.token_types)
    if pooling.labels and behind:
        kind = {prefix + POOLED[1]: OF_KIND[pooling.kind]} if opened.config.has("classifier_pooling") else {}
        return found | {prefix + POOLED[0]: CLASSES, prefix + POOLED[2]: list(pooling.labels)} | kind
    if not pooling.generates or (opened.folder / "modules.json").is_file():
        found[prefix + POOLED[0]] = OF_KIND[pooling.kind]
    for name in own.dense:
        if (matrix := behind.get(f"{name}.weight")) is not None:
            found |= {f"{prefix}{name}_feat_out": matrix.shape[0], f"{prefix}{name}_feat_in": matrix.shape[1]}
    return found
