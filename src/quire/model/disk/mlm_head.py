"""The masked-language-model head of an encoder that makes sparse vectors: roles of it are added to its family."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.pooling_config import says_splade
from quire.model.disk.renamed_tensors import Rewrite, Rewritten
from quire.model.families.row import ACTIVATIONS, Family, MlmHead
from quire.model.spec import ModelSpec

BIAS = "mlm_head_bias"
"""What the decoder's bias is seen as, below what it lies in."""


def with_mlm_head(
    folder: Path, config: HfConfig, spec: ModelSpec, family: Family, source: TensorSource
) -> tuple[Family, ModelSpec, TensorSource]:
    """The three with the head, where the folder asks for sparse vectors and has one; else `family.mlm` is None.

    `ModelError` for an activation that is not known.
    """
    mlm = family.mlm
    matrix = "" if mlm is None else mlm.dense or mlm.decoder
    there = f"{matrix}.weight" in source.infos or (matrix == family.names.get("head") and spec.tied_head)
    if mlm is None or not there or not folder.is_dir() or not says_splade(folder):
        return replace(family, mlm=None), spec, source
    if not mlm.dense:
        return family, spec, source
    names = {**family.names, "head_dense": mlm.dense, "head_norm": mlm.norm}
    tied = config.flag("tie_word_embeddings", True) or f"{mlm.decoder}.weight" not in source.infos
    if not tied:
        names["head"] = mlm.decoder
    required = [*family.required, "head_dense", "head_norm"]
    biases = mlm.biases if tied else mlm.biases[::-1]  # which are one where the decoder is tied
    bias = next((name for name in biases if name in source.infos), "")
    rewrites = family.rewrites
    if bias:
        below, _, own = bias.rpartition(".")
        names["head_bias"] = f"{below}.{BIAS}"
        required.append("head_bias")
        rule = Rewrite(rf"({re.escape(below)}\.){own}", rf"\1{BIAS}.weight", release=rf"\1{own}")
        source, rewrites = Rewritten(source, (rule,)), (rule, *rewrites)
    edges = replace(spec.edges, activation=_activation(mlm, config, spec))
    made = replace(family, names=names, required=tuple(required), rewrites=rewrites)
    return made, replace(spec, edges=edges, tied_head=tied), source


def with_every_part(folder: Path, config: HfConfig, spec: ModelSpec, family: Family) -> tuple[Family, ModelSpec]:
    """The two with all that files may have of the head, where the folder asks for sparse vectors: for weights that are
    made up."""
    mlm = family.mlm
    if mlm is None or not mlm.dense or not folder.is_dir() or not says_splade(folder):
        return family, spec
    names = {**family.names, "head_dense": mlm.dense, "head_norm": mlm.norm, "head_bias": BIAS}
    tied = config.flag("tie_word_embeddings", True)
    if not tied:
        names["head"] = mlm.decoder
    required = (*family.required, "head_dense", "head_norm", "head_bias")
    return replace(family, names=names, required=required), replace(spec, tied_head=tied)


def _activation(mlm: MlmHead, config: HfConfig, spec: ModelSpec) -> str:
    said = config.text(mlm.spelled, mlm.activation) if mlm.spelled else mlm.activation
    if said and said not in ACTIVATIONS:
        raise config.fail(mlm.spelled, f"{said!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[said] if said else spec.activation
