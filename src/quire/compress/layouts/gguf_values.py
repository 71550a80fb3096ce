"""The numbers of the tensors of a GGUF file, from what a model folder holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.compress.layouts.gguf_pieces import Piece, columns_of, rows_of, shape_of
from quire.core.dtypes import F32
from quire.gguf.encode import encode
from quire.gguf.imatrix import Importance, importance_of
from quire.model.disk.gguf_architecture import Architecture
from quire.model.load.roles import DISK_ROLES
from quire.model.mixers.latent import from_latents
from quire.model.spec import ModelSpec
from quire.model.stream_roles import IN_FILE
from quire.ops.arrays import to_torch, unit_rows
from quire.ops.lazy import torch
from quire.ops.weights import Weight
from quire.quant.base import QWeight
from quire.quant.registry import DENSE, matrix_scheme
from quire.quant.registry import load as load_matrix

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 1 << 22
"""Numbers that are widened at once."""


@dataclass(frozen=True)
class Values:
    """Encodes what becomes of the tensors of a folder in a file of `architecture`.

    `weights`: matrices by the names of the folder's, in whose place they are. `important`: how much errors of columns
    count, of the file `imatrix`.
    """

    architecture: Architecture
    weights: Mapping[str, Weight]
    important: Importance = field(default_factory=dict)
    imatrix: str = ""

    def encoded(self, piece: Piece, at: int, kind: str) -> np.ndarray[Any, Any]:
        """One matrix or vector of a tensor: uint8 [n, bytes of a row], or [bytes] of a vector."""
        if (made := self.architecture.made.get(piece.role)) is not None:
            own: np.ndarray[Any, Any] = encode(made(piece.of.spec.at(piece.layer))[None], kind)[0]
            return own
        given = self.weights.get(piece.bases[at]) if piece.part == "weight" else None
        if given is not None and (exact := self._exact(piece, given, kind)) is not None:
            return exact
        values = self._numbers(piece, piece.parts[at]) if given is None else given.dequantize()
        if kind == "I32":
            whole: np.ndarray[Any, Any] = values.numpy().astype("<i4")
            return whole.view(np.uint8)
        values = self._changed(piece, values)
        if values.dim() == 1:
            vector: np.ndarray[Any, Any] = encode(values.float()[None].numpy(), kind)[0]
            return vector
        values = values.reshape(-1, values.shape[-1])
        n, k = values.shape
        weigh = importance_of(self.important, piece.name, at, len(piece.bases), k, self.imatrix)
        step = max(1, ROWS // k)
        rows = [encode(values[i : i + step].float().numpy(), kind, weigh) for i in range(0, n, step)]
        if piece.role not in IN_FILE:
            return np.concatenate(rows)
        tokens = shape_of(piece, self.architecture)[0]
        return np.concatenate((*rows, np.repeat(rows[0][:1], max(0, tokens - n), 0)))[:tokens]

    def _exact(self, piece: Piece, weight: Weight, kind: str) -> np.ndarray[Any, Any] | None:
        """The bytes of a matrix whose codes are the format's, None where they are not."""
        if piece.role in PARTS or self.architecture.factor(piece.role, piece.of.spec.at(piece.layer)) is not None:
            return None
        rows, columns = rows_of(piece, self.architecture), columns_of(piece, self.architecture)
        weight = weight if rows is None else weight.take_rows(torch.from_numpy(rows))
        weight = weight if columns is None else QWeight(weight).take_cols(columns).weight
        return _as_blocks(weight, kind)

    def _numbers(self, piece: Piece, parts: Mapping[str, str]) -> Tensor:
        """What the folder holds, its codes as numbers, and matrices as [n, k]."""
        source, scheme = piece.of.source, matrix_scheme(piece.of.scheme, parts)
        if piece.part == "bias" or scheme is DENSE:
            values = to_torch(source.tensor(parts[piece.part]))
            turned = piece.of.family.transposed and DISK_ROLES[piece.role].kind == "linear" and piece.layer is not None
            return values.t() if turned and piece.part == "weight" else values
        raw = {suffix: source.tensor(name) for suffix, name in parts.items() if suffix != "bias"}
        return to_torch(load_matrix(scheme, raw, F32, 0).dequantize())

    def _changed(self, piece: Piece, values: Tensor) -> Tensor:
        """The numbers as the file has them, in its order."""
        spec, role = piece.of.spec.at(piece.layer), piece.role
        if role in PARTS and piece.part == "weight":
            return PARTS[role](values, spec)
        values = values.reshape(shape_of(piece, self.architecture)) if DISK_ROLES[role].biased else values
        if (rows := rows_of(piece, self.architecture)) is not None:
            values = values[torch.from_numpy(rows)]
        if piece.part == "weight" and (columns := columns_of(piece, self.architecture)) is not None:
            values = values[:, torch.from_numpy(columns)]
        if role == "positions":
            values = values[spec.position_offset :]  # those before are of no token
        if role in self.architecture.rates:
            values = self.architecture.rate_sign * values.float().exp()
        if piece.part == "weight" and spec.stored_less_one(role):
            values = values.float() + 1
        if role == "head" and spec.unit_head and piece.part == "weight":
            values = unit_rows(values.float())
        factor = self.architecture.factor(role, spec)
        return values if factor is None else values.float() * _along_rows(factor, values)


def _along_rows(factor: np.ndarray[Any, Any], values: Tensor) -> Tensor:
    """One factor, or one for each row, to multiply `values` by."""
    tensor = torch.from_numpy(factor)
    return tensor[:, None] if tensor.dim() == 1 and values.dim() == 2 else tensor


def _keys_of_latents(values: Tensor, spec: ModelSpec) -> Tensor:
    """Rows [heads * rank, nope] of keys, turned in each head, of the matrix of keys and values."""
    both = values.view(from_latents(spec))
    return both[:, : spec.mla.nope].transpose(1, 2).reshape(-1, spec.mla.nope)


def _values_of_latents(values: Tensor, spec: ModelSpec) -> Tensor:
    """Rows [heads * value, rank] of values, of the matrix of keys and values."""
    both = values.view(from_latents(spec))
    return both[:, spec.mla.nope :].flatten(0, 1)


PARTS = {"k_b": _keys_of_latents, "v_b": _values_of_latents}
"""Matrices that are made of parts of the heads of another."""


def _as_blocks(weight: Weight, kind: str) -> np.ndarray[Any, Any] | None:
    """Return the bytes uint8 [n, bytes of a row] of a weight that Q4_0, Q4_1 or Q8_0 holds exactly; else None."""
    form = {"Q4_0": ("int4", False), "Q4_1": ("int4", True), "Q8_0": ("int8", False)}.get(kind)
    if (weight.kind, weight.mins is not None) != form or weight.zeros is not None or weight.order is not None:
        return None
    assert weight.scales is not None
    n = weight.shape[0]
    floats = [t for t in (weight.scales, weight.mins) if t is not None]
    if weight.group % 32 or any(not torch.equal(t.half().float(), t.float()) for t in floats):
        return None
    halves = [t.half().repeat_interleave(weight.group // 32, 1).view(-1, 1).view(torch.uint8) for t in floats]
    codes = weight.codes.contiguous().view(-1, 32).view(torch.uint8)
    if weight.kind == "int4":
        codes = codes if weight.mins is not None else codes + 8
        codes = codes[:, :16] | codes[:, 16:] << 4
    return torch.cat((*halves, codes), 1).view(n, -1).numpy()
