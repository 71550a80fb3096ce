"""The flat arrays of one step, always handed on as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from quire.core.images import PromptImage
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.ops.recurrent import StateBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences; in brackets vLLM's names.

    tokens, positions [T] int32; slots (slot_mapping) [T] int64: block * block_size + offset in the cache; cu_q
    (query_start_loc) [S + 1] int32: rows cu_q[s]..cu_q[s + 1] belong to sequence s; context (seq_lens) [S] int32:
    tokens in the cache once these rows are written; block_tables [S, max_blocks] int32; logit_rows (logits_indices)
    [R] int32: rows that want logits; tree [T] int64: ancestors of the rows of a branching draft, as `ops.attention`
    reads them, or None.

    With an encoder, all of these are of the decoder's part of the sequences. `cross`: the rows as cross attention sees
    them, each a sequence of one, with the context and the blocks of its encoder's part. `states`: where layers have
    recurrent states. `lasting_tables` [S, max_blocks] int32: block tables of what stays of a layer with a window, where
    these are others. `inputs` [T, layers * width] f32: what layers are given of each token beside the stream; a decoder
    whose layers are makes it.
    """

    tokens: Array
    positions: Array
    slots: Array
    cu_q: Array
    context: Array
    block_tables: Array
    logit_rows: Array
    tree: Array | None = None
    cross: Batch | None = None
    states: StateBatch | None = None
    inputs: Array | None = None
    lasting_tables: Array | None = None


class Forward(Protocol):
    """Tokens to logits: a decoder of the table's families, or one that runs by other code."""

    @property
    def ops(self) -> Ops:
        """The ops that it calls."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether all of a step is native calls, so that it may be recorded and replayed."""
        ...

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Logits f32 [R, V] of the rows `batch.logit_rows`; keys and values of all rows are written to `caches`."""
        ...

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Touch the memory that a step like `batch` needs; returns those of `caches` that it wrote to."""
        ...


class Vision(Protocol):
    """Images to rows of the decoder's stream: a tower and what joins it to the model."""

    @property
    def width(self) -> int:
        """Numbers of a row: hidden x (1 + layers that are given more)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        ...

    @property
    def file(self) -> Path | None:
        """The file that it lies in, if that is not one of the decoder's."""
        ...

    def scratch(self, rows: int) -> int:
        """Bytes that encoding an image of `rows` rows takes beside its features."""
        ...

    def __call__(self, image: PromptImage) -> Array:
        """f32 [image.rows, width], which nothing changes later. A function of the image alone, to the bit."""
        ...


@runtime_checkable
class Continues(Protocol):
    """A decoder that reads, beside each token, a hidden row that another left: the first of `given` [rows, hidden]."""

    @property
    def given(self) -> Array:
        """f32, at one address."""
        ...
