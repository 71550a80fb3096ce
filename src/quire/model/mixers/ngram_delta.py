"""What a layer with the gated delta rule keeps beside it where it is given embeddings of n-grams (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.dtypes import Dtype
from quire.model.layer_sizes import NO_NGRAMS, Ngrams
from quire.model.mixers.delta import DeltaRule
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout
from quire.ops.ngrams import DIGITS

HASHED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
"""Tensors of files with what follows from config.json: factors, sizes and first rows of `NgramHash`."""
TOGETHER = 16
"""Numbers of a row that lie together, so that what follows it lies well."""


def digit_columns(tokens: int) -> int:
    """Numbers that the cache keeps of a token, of which n-grams of `tokens` tokens are made."""
    return -(-DIGITS * (tokens - 1) // TOGETHER) * TOGETHER


@dataclass(frozen=True)
class NgramDeltaRule(DeltaRule):
    """A `Mixer`. `ngrams`: sizes of what the layer is given, and numbers of all `streams` that it is added to."""

    ngrams: Ngrams = NO_NGRAMS
    streams: int = 0

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """Rows of the rule's convolution, of that of n-grams, and digits of tokens."""
        widths = self.streams, digit_columns(self.ngrams.tokens)
        return (*super().parts(block_size, dtype, heads), *(RowLayout.of(block_size, n, dtype) for n in widths))


def _all(spec: ModelSpec) -> int:
    return spec.streams.count * spec.hidden


def _head(spec: ModelSpec) -> int:
    return spec.ngrams.width // max(1, spec.ngrams.heads)


ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.ngrams.at(layer))
    for name, role in {
        "ngram_table": Role("table", lambda s: (s.ngrams.rows, _head(s)), layer=False),
        "ngram_key": Role("linear", lambda s: (_all(s), s.ngrams.width)),
        "ngram_value": Role("linear", lambda s: (s.hidden, s.ngrams.width)),
        **{f"ngram_{name}_norm": Role("vector", lambda s: (_all(s),)) for name in ("key", "query", "value")},
        "ngram_conv": Role("vector", lambda s: (_all(s), s.ngrams.taps), biased=True),
    }.items()
}
"""What it has on disk; each rank has all of it."""
