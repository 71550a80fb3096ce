"""The Triton backend's side of the ops of ngrams.py: few numbers a row, in torch's own kernels."""

from __future__ import annotations

from torch import Tensor

from quire.ops.ngrams import NgramHash
from quire.ops.op import impl
from quire.ops.reference import ngrams as definitions
from quire.ops.triton.gpu import Gpu


@impl("ngram_rows", "triton")
def ngram_rows(gpu: Gpu, tokens: Tensor, before: Tensor, by: NgramHash) -> Tensor:
    return definitions.ngram_rows(tokens, before, by)


@impl("gate_values", "triton")
def gate_values(gpu: Gpu, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    return definitions.gate_values(key.float(), query.float(), value.float()).to(value.dtype)
