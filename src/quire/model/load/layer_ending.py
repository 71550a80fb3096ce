"""What layers have behind their MLPs, and what they are given of each token, from what the checkpoint holds."""

from __future__ import annotations

from math import sqrt

import numpy as np

from quire.model.disk.checkpoint import read_scattered
from quire.model.disk.stacked import StackedSource
from quire.model.load.parts import load_norm
from quire.model.load.reader import WeightReader
from quire.model.net.decoder import Ending
from quire.model.net.layer_ending import GivenInputs, MappedEmbedding, PerLayerEmbeddings, ScaledStream, SummedRows
from quire.model.net.parts import Embed, Embedding
from quire.ops.arrays import Host, address, dtype_of, to_numpy
from quire.ops.weights import PackedTable, PieceTable
from quire.quant.base import QWeight
from quire.quant.registry import load as load_matrix
from quire.quant.registry import matrix_scheme
from quire.quant.stored import StoredWeight


def load_ending(reader: WeightReader, index: int) -> Ending:
    """What layer `index` does to the stream behind its MLP."""
    found = reader.vector("stream_scale", index)
    factor = 1.0 if found is None else float(to_numpy(found)[0])
    if not reader.opened.spec.inputs.width:
        return ScaledStream(factor)
    gate, project = reader.linear(("input_gate",), index), reader.linear(("input_project",), index)
    norm = load_norm(reader, "input_norm", index, factor)
    return GivenInputs(index, gate, project, norm, reader.opened.spec.activation, factor)


def load_inputs(reader: WeightReader) -> PerLayerEmbeddings:
    """What layers are given of embedded tokens: both parts halved in variance, rows of tokens by sqrt(width)."""
    spec = reader.opened.spec
    width, weight = spec.inputs.width, reader.vector("input_rows_norm")
    assert weight is not None, "claimed"
    norm = np.tile(to_numpy(weight) * np.float32(sqrt(0.5)), spec.layers)
    rows, table = reader.linear(("input_rows",), None), load_input_table(reader)
    return PerLayerEmbeddings(table, rows, norm, width, spec.norm_eps * spec.hidden, sqrt(width / 2))


def file_table(reader: WeightReader, role: str, first: int | None = None) -> Embedding:
    """A look-up table [V, width] whose rows are read out of the mapped file, each when it is asked for. `first`: as of
    `Embedding`.

    Codes of which single rows cannot be read are packed as a matrix; on devices that read no files the table is as
    `WeightReader.table`.
    """
    ops, names = reader.ops, reader.opened.claim.get(role)
    inside = reader.opened.in_file(role) > 0
    if ops.reads_packed_tables and ops.reads_files and not inside and "weight" not in names:
        return Embedding(PackedTable(reader.linear((role,), None).weight, rounded=False), first)
    if not ops.reads_files or not inside:
        return Embedding(reader.table(role), first)
    if "weight" in names and isinstance(source := reader.opened.source, StackedSource):
        pieces = tuple(to_numpy(piece) for piece in source.pieces(names["weight"]))
        if len(pieces) > 1:
            return _mapped_pieces(reader, role, pieces)
    if "weight" in names:
        found = to_numpy(reader.read(names["weight"]))
        read_scattered(found)
        reader.count(role, f"{dtype_of(found).name} in the file", 0)
        return MappedEmbedding(found, first)
    weight = stored_matrix(reader, role)
    assert isinstance(weight, StoredWeight), "its rows are blocks"
    table = weight.as_table()
    read_scattered(to_numpy(table.data))
    reader.count(role, f"{table.form.name} in the file", 0)
    return MappedEmbedding(table, first)


def _mapped_pieces(reader: WeightReader, role: str, pieces: tuple[Host, ...]) -> Embedding:
    """A look-up table whose rows are read out of pieces, as `file_table` does."""
    for piece in pieces:
        read_scattered(piece)
    reader.count(role, f"{dtype_of(pieces[0]).name} in the file", 0)
    return MappedEmbedding(PieceTable(pieces, np.array([address(piece) for piece in pieces], np.int64)))


def stored_matrix(reader: WeightReader, role: str) -> QWeight:
    """A matrix in its format on disk."""
    names = reader.opened.claim.get(role)
    scheme = matrix_scheme(reader.opened.scheme, names)
    return load_matrix(scheme, {part: reader.read(name) for part, name in names.items()}, reader.form.dtype, 0)


def load_input_table(reader: WeightReader) -> Embed:
    """The table of per-layer embeddings; tokens beyond it, which stand for images and sounds, have its first row."""
    spec = reader.opened.spec
    known = spec.inputs.vocab_size
    if known >= spec.vocab_size:
        return file_table(reader, "input_table")
    table = file_table(reader, "input_table", 0)
    row = stored_matrix(reader, "input_table").take_rows(slice(0, 1)).dequantize()
    beyond = np.repeat(to_numpy(row), spec.vocab_size - known, 0)
    return SummedRows((table, Embedding(beyond, known)))
