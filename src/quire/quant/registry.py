"""The known weight formats: those a checkpoint can be in, and those `--quantization` can make at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ConfigError, ModelError
from quire.quant.base import Quantizer, QuantScheme
from quire.quant.dense import Dense
from quire.quant.rtn import INT4, INT8

SCHEMES: tuple[QuantScheme, ...] = (Dense(),)
QUANTIZERS: dict[str, Quantizer] = {q.name: q for q in (INT8, INT4)}


def detect(names: set[str], config: Mapping[str, Any], where: str) -> QuantScheme:
    """The format of a checkpoint from its tensor names and its `quantization_config` (empty when it has none)."""
    for scheme in SCHEMES:
        if scheme.detect(names, config):
            return scheme
    method = config.get("quant_method", "unknown")
    raise ModelError(
        f"{where}: quantization_config: quant_method {method!r} cannot be read; known formats: "
        f"{', '.join(s.name for s in SCHEMES)}. Use the unquantized checkpoint and --quantization"
    )


def quantizer(name: str | None) -> Quantizer | None:
    """The format `--quantization` names, or None when the option is not given."""
    if name is None or name == "none":
        return None
    if name not in QUANTIZERS:
        raise ConfigError(
            f"--quantization {name!r} is not known; known: none, {', '.join(QUANTIZERS)}", param="quantization"
        )
    return QUANTIZERS[name]
