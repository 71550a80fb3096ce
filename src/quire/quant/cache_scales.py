"""Scales of keys and values that a checkpoint brings along for a quantized cache (`kv_cache_scheme`).

They are one number a layer or head, found from texts: `k_scale` and `v_scale` beside the attention's matrices, in older
files `output_scale` of the matrices of keys and values. The caches here scale every token and head by itself, which
rounds less than any scale fixed before, and no kernel takes such a one; so these are read past, and it is said.
"""

from __future__ import annotations

from quire.quant.base import Fields

ENDINGS = tuple(
    f".{name}_{number}"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "k_proj.k", "v_proj.v", "k_proj.output", "v_proj.output")
    for number in ("scale", "zero_point")
)


def cache_scales(config: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(endings of the names of tensors that are not read, notes) from a `quantization_config`."""
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
