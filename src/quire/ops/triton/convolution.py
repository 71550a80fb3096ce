"""The GPU backend's side of causal convolutions."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.ops.convolution import Convolution, check_convolution
from quire.ops.layout import KVCache
from quire.ops.op import impl
from quire.ops.triton import convolution_kernels as kernels
from quire.ops.triton.checks import activations, check_cache, tensor
from quire.ops.triton.gpu import Gpu


@impl("causal_conv", "triton")
def causal_conv(
    gpu: Gpu,
    x: Tensor,
    cache: KVCache,
    slots: Tensor,
    paged: tuple[Tensor, Tensor, Tensor],
    conv: Convolution,
    tree: Tensor | None = None,
) -> Tensor:
    check_convolution(conv, cache)
    check_cache(cache)
    n, (cu_q, context, block_tables) = conv.width, paged
    rows, _ = activations(x, "causal_conv x", width=n * (3 if conv.gated else 1))
    tensor(slots, "causal_conv slots", torch.int64, rows)
    sequences = len(tensor(context, "causal_conv context", torch.int32, -1))
    tensor(cu_q, "causal_conv cu_q", torch.int32, sequences + 1)
    blocks = tensor(block_tables, "causal_conv block_tables", torch.int32, sequences, -1).shape[1]
    tensor(conv.weight, "causal_conv weight", torch.float32, conv.taps, n)
    if conv.bias is not None:
        tensor(conv.bias, "causal_conv bias", torch.float32, n)
    if tree is not None:
        tensor(tree, "causal_conv tree", torch.int64, rows)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows and sequences:
        size = min(next_power_of_2(n), gpu.config("rowwise")["block"])
        kernels.convolution_kernel[(rows, cdiv(n, size))](
            out, x, slots, cache.keys, cache.values, cu_q, context, block_tables, tree, conv.weight, conv.bias,
            sequences, blocks, cache.keys.stride(0), n, TAPS=conv.taps, SIZE=cache.layout.block_size,
            GATED=int(conv.gated), ACTIVE=int(conv.activation == "silu"), BLOCK=size,
        )  # fmt: skip
    elif rows:
        out.zero_()
    return out
