"""Sparse vectors: what an engine gave, and what callers get of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest
from quire.core.pooling import Pooling
from quire.core.request import Output

NOT_DENSE = "this model makes sparse vectors; use /embed_sparse or LLM.embed_sparse"
MODULES = (
    '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"}, '
    '{"idx": 1, "name": "1", "path": "1_SpladePooling", "type": '
    '"sentence_transformers.sparse_encoder.models.SpladePooling"}]'
)
"""modules.json of a SPLADE model."""
SETTINGS = '{"pooling_strategy": "max", "activation_function": "relu"}'
"""1_SpladePooling/config.json of most of them."""


@dataclass(frozen=True, slots=True)
class SparseEmbeddingOutput:
    """The tokens of the vocabulary whose weights are above 0, in ascending order, and these weights."""

    indices: list[int]
    values: list[float]


def sparse_of(output: Output) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """What the engine gave: tokens [n] int32, ascending, and their weights [n] f32, none of which is 0."""
    count = int(np.frombuffer(output.pooled, np.int32, 1)[0])
    indices = np.frombuffer(output.pooled, np.int32, count, 4)
    return indices, np.frombuffer(output.pooled, np.float32, count, 4 + 4 * count)


def filled(pooling: Pooling, output: Output) -> NDArray[np.float32]:
    """A sparse vector with every token of the vocabulary, f32 [width]."""
    made = np.zeros(pooling.width, np.float32)
    indices, values = sparse_of(output)
    made[indices] = values
    return made


def check_dense(pooling: Pooling) -> None:
    """`BadRequest` for a model of sparse vectors."""
    if pooling.kind == "splade":
        raise BadRequest(NOT_DENSE)


def check_sparse(pooling: Pooling) -> None:
    """`BadRequest` for a model whose vectors are not sparse."""
    if pooling.kind != "splade":
        raise BadRequest(
            "this model is not an embedding model with SPLADE pooling; if its files have a masked-language-model head, "
            f"write modules.json into its folder, {MODULES}, and 1_SpladePooling/config.json, {SETTINGS}"
        )
