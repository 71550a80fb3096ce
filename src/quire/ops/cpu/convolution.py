"""The CPU backend's side of causal convolutions."""

from __future__ import annotations

from quire.core.dtypes import F32, I64
from quire.ops.arrays import Host, address
from quire.ops.convolution import Convolution, check_convolution
from quire.ops.cpu.descriptor_cache import Paged, address_or_none, batch_descriptor, cache_descriptor
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import ConvolutionDescriptor
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl


@impl("causal_conv", "cpu")
def causal_conv(
    cpu: Cpu,
    x: Host,
    cache: KVCache,
    slots: Host,
    paged: Paged,
    conv: Convolution,
    tree: Host | None = None,
) -> Host:
    rows = check(x, "causal_conv x", F32, -1, conv.width * (3 if conv.gated else 1)).shape[0]
    check(slots, "causal_conv slots", I64, rows)
    if tree is not None:
        check(tree, "causal_conv tree", I64, rows)
    batch = batch_descriptor(cpu, "causal_conv", paged, tree)
    at_cache, by = cache_descriptor(cpu, cache), _descriptor(cpu, conv, cache)
    out = cpu.arena.empty(rows, conv.width)
    if rows:
        cpu.call("causal_conv", out, x, slots, at_cache, batch, by, rows)
    return out


def _descriptor(cpu: Cpu, conv: Convolution, cache: KVCache) -> ConvolutionDescriptor:
    found = cpu.convolutions.get(conv)
    if found is not None and found.width == 2 * cache.layout.head_dim:
        return found
    check_convolution(conv, cache)
    check(conv.weight, "causal_conv weight", F32, conv.taps, conv.width)
    if conv.bias is not None:
        check(conv.bias, "causal_conv bias", F32, conv.width)
    made = cpu.convolutions[conv] = ConvolutionDescriptor(
        weight=address(conv.weight), bias=address_or_none(conv.bias), taps=conv.taps, width=conv.width,
        silu=int(conv.activation == "silu"), gated=int(conv.gated),
    )  # fmt: skip
    return made
