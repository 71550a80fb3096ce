"""Embeddings of n-grams of a layer, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.core.errors import ModelError
from quire.model.load.layer_ending import file_table
from quire.model.load.reader import WeightReader
from quire.model.mixers.ngram_delta import HASHED, digit_columns
from quire.model.net.gated_ngrams import GatedNgrams, NgramEmbedding
from quire.ops.arrays import AnyArray, Host, to_numpy
from quire.ops.convolution import Convolution
from quire.ops.ngrams import DIGITS, NgramHash


def load_ngrams(reader: WeightReader, index: int) -> GatedNgrams:
    """What layer `index` is given of n-grams."""
    spec, sizes = reader.opened.spec, reader.opened.spec.ngrams
    key_norm, query_norm, value_norm = (
        _vector(reader, f"ngram_{name}_norm", index) for name in ("key", "query", "value")
    )
    taps = to_numpy(_vector(reader, "ngram_conv", index)).reshape(-1, sizes.taps)
    spaced = np.zeros((sizes.reach, len(taps)), F32)
    spaced[:: sizes.tokens] = taps.T
    found = reader.once("digits of tokens", lambda: _digits(reader))
    embedding = NgramEmbedding(found, _recall(sizes.tokens), _hash(reader), file_table(reader, "ngram_table"))
    return GatedNgrams(
        embedding,
        reader.linear(("ngram_key",), index),
        reader.linear(("ngram_value",), index),
        key_norm,
        query_norm,
        value_norm,
        Convolution(spaced, None, "silu"),
        spec.hidden,
        spec.norm_eps,
    )


def _vector(reader: WeightReader, role: str, index: int) -> AnyArray:
    found: AnyArray | None = reader.vector(role, index)
    assert found is not None, "the family requires it"
    return found


def _digits(reader: WeightReader) -> Host:
    """The digits of the number of each token plus 1, once for each token that an n-gram reaches back, f32."""
    spec = reader.opened.spec
    numbers = np.arange(1, spec.vocab_size + 1, dtype=np.int64)
    digits = np.stack([numbers >> 8 * i & 255 for i in range(DIGITS)], 1).astype(F32)
    found = np.zeros((spec.vocab_size, digit_columns(spec.ngrams.tokens)), F32)
    found[:, : DIGITS * (spec.ngrams.tokens - 1)] = np.tile(digits, spec.ngrams.tokens - 1)
    reader.count("ngram_digits", "f32", found.nbytes)
    return found


def _recall(tokens: int) -> Convolution:
    """The digits that lie behind those of each distance, of the row so far back."""
    weight = np.zeros((tokens, digit_columns(tokens)), F32)
    for back in range(1, tokens):
        weight[tokens - 1 - back, DIGITS * (back - 1) : DIGITS * back] = 1
    return Convolution(weight)


def _hash(reader: WeightReader) -> NgramHash:
    """The numbers of the spec, which those of the files must be, where these have any."""
    sizes, source = reader.opened.spec.ngrams, reader.opened.source
    factors, own = np.array(sizes.factors, np.int64), np.array(sizes.sizes, np.int64)
    firsts = np.cumsum(own) - own
    for ending, known in zip(HASHED, (factors, own, firsts), strict=True):
        for name in source.infos:
            if name.endswith(f".{ending}") and not np.array_equal(to_numpy(reader.read(name)), known):
                raise ModelError(f"{reader.opened.folder}: {name} is not what follows from config.json")
    return NgramHash(factors, np.stack((own, firsts)), sizes.end)
