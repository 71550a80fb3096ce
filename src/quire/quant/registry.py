"""The known weight formats: those a checkpoint can be in, and those `--quantization` can make at load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import numpy as np

from quire.core.dtypes import Dtype
from quire.core.errors import ConfigError
from quire.ops.arrays import Array, Host, to_numpy
from quire.quant import awq, bitnet, bitsandbytes, compressed_tensors, fp4, fp8, gptq
from quire.quant.base import Fields, Quantizer, QuantScheme, QWeight
from quire.quant.codebook import MXFP4, NF4
from quire.quant.dense import Dense
from quire.quant.float8 import FP8
from quire.quant.gguf import Block, Gguf
from quire.quant.mixed import Mixed
from quire.quant.rtn import INT4, INT8
from quire.quant.sparse import Sparse

DENSE = Dense()
READERS: dict[str, Callable[[Fields, Mapping[str, str]], QuantScheme]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "mxfp4": fp4.read,
    "bitnet": bitnet.read,
    "bitsandbytes": bitsandbytes.read,
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
}
"""`quant_method` of a checkpoint -> its format from the fields beside it and the tensors, name here -> in the file."""
QUANTIZERS: dict[str, Quantizer] = {q.name: q for q in (INT8, INT4, NF4, MXFP4, FP8)}


def detect(names: Collection[str], config: Fields, origins: Mapping[str, str] = MappingProxyType({})) -> QuantScheme:
    """The format of a checkpoint from its `quantization_config` (empty when it has none) and its tensor names.

    `origins`: what tensors are called in the file where that is another name.
    """
    known = f"known: {', '.join(READERS)}"
    if not config.raw:
        packed = next((n for n in sorted(names) if n.endswith((".qweight", ".weight_packed"))), None)
        if packed is not None:
            raise config.fail("quant_method", f"is missing, but {packed} is quantized; {known}")
        return DENSE
    method = config.text("quant_method")
    if method not in READERS:
        raise config.fail(
            "quant_method", f"{method!r} cannot be read; {known}. Use the unquantized checkpoint and --quantization"
        )
    return READERS[method](config, {name: origins.get(name, name) for name in names})


def matrix_scheme(scheme: QuantScheme, present: Mapping[str, str]) -> QuantScheme:
    """The format of one matrix of a checkpoint in `scheme` from its tensors, suffix -> name: `scheme`, or dense."""
    if isinstance(scheme, Gguf):
        return scheme.member(present) or DENSE
    if isinstance(scheme, Mixed):
        base = next((name.removesuffix(f".{suffix}") for suffix, name in present.items()), "")
        scheme = scheme.of.get(base, DENSE)
    own = [part for part in scheme.parts if part != "weight"]
    return scheme if not own or any(part in present for part in own) else DENSE


def laid_out(scheme: QuantScheme) -> bool:
    """Whether packing is one pass over the file's bytes, as fast as reading what it made would be at a later start."""
    return isinstance(scheme, Dense) or (isinstance(scheme, Gguf) and scheme.native)


def rows_in_file(scheme: QuantScheme, present: Mapping[str, str]) -> bool:
    """Whether rows of a matrix of a checkpoint in `scheme`, with the tensors `present`, can be read out of the file one
    at a time: numbers, and blocks that the native extension reads."""
    own = matrix_scheme(scheme, present)
    return own is DENSE or (isinstance(own, Block) and own.form.native and "scale" not in present)


def load(scheme: QuantScheme, raw: Mapping[str, Array], dtype: Dtype, float8: int) -> QWeight:
    """A matrix from its parts on disk. Those in float8 stay as they are for activations of `float8` bits, if not 0.

    A dense one may be a torch tensor, which the weight then holds.
    """
    if isinstance(scheme, Dense):
        return scheme.load(raw, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # scales of a damaged file, which are refused
        return _quantized(scheme, {name: to_numpy(part) for name, part in raw.items()}, dtype, float8)


def _quantized(scheme: QuantScheme, raw: Mapping[str, Host], dtype: Dtype, float8: int) -> QWeight:
    inner = scheme.inner if isinstance(scheme, Sparse) else scheme
    if not float8 or not isinstance(inner, fp8.Fp8):
        return scheme.load(raw, dtype)
    parts = scheme.expand(raw) if isinstance(scheme, Sparse) else raw
    return inner.keep(parts, float8) or inner.load(parts, dtype)


def quantizer(name: str | None, stored: str = "") -> Quantizer | None:
    """The format `--quantization` names; None when it is not given, or says what the file is anyhow.

    `stored`: the format of a file that is quantized already, by its name.
    """
    if name is None or name == "none" or (stored and name == stored):
        return None
    if name not in QUANTIZERS and name in (*READERS, "gguf"):
        raise ConfigError(
            f"--quantization {name}: the model's files are {stored or 'not quantized'}, and {name} is not made while "
            f"loading; leave it out, or use one of {', '.join(QUANTIZERS)} with an unquantized model",
            param="quantization",
        )
    if name not in QUANTIZERS:
        raise ConfigError(
            f"--quantization {name!r} is not known; known: none, {', '.join(QUANTIZERS)}", param="quantization"
        )
    return QUANTIZERS[name]


ENDINGS = tuple(
    f".{name}_{number}"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "k_proj.k", "v_proj.v", "k_proj.output", "v_proj.output")
    for number in ("scale", "zero_point")
)
"""Of the names of tensors with scales of keys and values."""


def cache_scales(config: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(endings of the names of tensors that are not read, notes) from a `quantization_config`.

    Scales of keys and values that a checkpoint brings along for a quantized cache (`kv_cache_scheme`) are one number a
    layer or head, found from texts: `k_scale` and `v_scale` beside the attention's matrices, in older files
    `output_scale` of the matrices of keys and values. The caches here scale every token and head by itself, which
    rounds less than any scale fixed before, and no kernel takes such a one; so these are read past, and it is said.
    """
    scheme = config.child("kv_cache_scheme")
    if not scheme.raw:
        return (), ()
    bits, kind = scheme.integer("num_bits", 8, high=16), scheme.text("type", "int")
    here = {("float", 8): "fp8", ("int", 8): "int8"}.get((kind, bits))
    advice = "are kept as --kv-cache-dtype says" if here is None else f"are so with --kv-cache-dtype {here}"
    return ENDINGS, (
        f"the file asks for keys and values of {bits} bits ({kind}) at scales of its own: here they {advice}, scaled "
        "token by token and head by head, and its scales are not used",
    )
