"""The stage that adds scales of keys and values to a folder, as compressed-tensors has them (`kv_cache_scheme`)."""

from __future__ import annotations

from typing import Any

import torch

from quire.compress.context import Context
from quire.compress.layouts.compressed import CompressedTensors
from quire.compress.matrices import matrices
from quire.compress.net import Net
from quire.compress.quantize.kv_scales import CachePeaks
from quire.compress.stages import Kv
from quire.compress.walk import Stream
from quire.compress.write import copy_beside, whole_folder, write_json, write_tensors
from quire.core.errors import ConfigError
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.hf_config import read_json
from quire.quant.cache_scales import ENDINGS

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
TYPES = {"fp8": "float", "int8": "int"}
MODULE = "self_attn"
"""The module beside whose matrices readers look for scales."""


def add_cache_scales(context: Context, stage: Kv) -> None:
    """Write the model with a scale of keys and one of values for each layer, the largest of the calibration text.

    `ConfigError` for models that keep latents, for families that name their attention otherwise than readers know it,
    and for folders in a format that has no place for scales.
    """
    net = Net.open(context.model)
    modules, config = attentions(net), with_scheme(net, stage)
    stream = Stream(net, context.rows().tokens, context.spill)
    layout, source = CompressedTensors(), Checkpoint(net.folder)
    tensors = {name: source.tensor(name) for name in source.infos if not name.endswith(ENDINGS)}
    for layer, module in enumerate(modules):
        peaks = CachePeaks()
        for matrix in matrices(net, layer):
            matrix.check(net)
        stream.advance(net.layer(layer), peaks.add)
        tensors |= layout.cache_tensors(module, *peaks.scales(DTYPES[stage.format]))
        context.tell(f"layer {layer + 2} of {len(modules)}" if layer + 1 < len(modules) else "writing")
    with whole_folder(context.target) as folder:
        write_tensors(folder, tensors, None)
        write_json(folder / "config.json", config)
        copy_beside(net.folder, folder)


def attentions(net: Net) -> list[str]:
    """The name of each layer's attention."""
    claim = net.opened.claim
    if net.spec.mla.rank:
        raise ConfigError(f"{net.name}: keeps latents instead of keys and values; leave the stage kv out")
    found = []
    for layer in range(net.spec.layers):
        weight = next(n for part, n in claim.get(claim.holder("k", layer), layer).items() if part.startswith("weight"))
        module = weight.rsplit(".", 2)[0]
        if module.rpartition(".")[2] != MODULE:
            raise ConfigError(f"{net.name}: has its attention in {module}, readers look for scales in {MODULE} alone; "
                              "leave the stage kv out")  # fmt: skip
        found.append(module)
    return found


def with_scheme(net: Net, stage: Kv) -> dict[str, Any]:
    """The fields of config.json that say how keys and values are kept, beside those of the folder."""
    scheme = {
        "num_bits": 8, "type": TYPES[stage.format], "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    layout = CompressedTensors(cache=scheme)
    raw = {"quantization_config": {"quant_method": "GGUF"}}
    if net.folder.is_dir():
        raw = read_json(net.folder / "config.json")
    said = raw.get("quantization_config") or layout.config({})
    if said.get("quant_method") != layout.name:
        raise ConfigError(
            f"{net.name}: files of {said.get('quant_method')} have no place for scales of keys and values; take the "
            "model before it was quantized"
        )
    return {**raw, "quantization_config": {**said, "kv_cache_scheme": scheme}}
