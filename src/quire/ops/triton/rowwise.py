"""The GPU backend's side of the ops that go row by row: norms, activations, positions, adapters."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.ops.experts import ACTIVATIONS
from quire.ops.op import impl
from quire.ops.triton import rowwise_kernels as kernels
from quire.ops.triton.checks import activations, tensor
from quire.ops.triton.gpu import Gpu

F32, I32 = torch.float32, torch.int32
KINDS = dict(
    zip(ACTIVATIONS, (kernels.SILU, kernels.GELU, kernels.GELU_TANH, kernels.RELU, kernels.RELU2), strict=True)
)


@impl("rmsnorm", "triton")
def rmsnorm(gpu: Gpu, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(gpu, "rmsnorm", x, None, weight, None, eps)


@impl("add_rmsnorm", "triton")
def add_rmsnorm(gpu: Gpu, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x, _norm(gpu, "add_rmsnorm", x, delta, weight, None, eps)


@impl("layernorm", "triton")
def layernorm(gpu: Gpu, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _norm(gpu, "layernorm", x, None, weight, bias, eps)


@impl("add_layernorm", "triton")
def add_layernorm(
    gpu: Gpu, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return x, _norm(gpu, "add_layernorm", x, delta, weight, bias, eps)


def _norm(
    gpu: Gpu, what: str, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    rows, d = activations(x, f"{what} x")
    tensor(weight, f"{what} weight", F32, d)
    if delta is not None:
        activations(delta, f"{what} delta", rows, d)
    if bias is not None:
        tensor(bias, f"{what} bias", F32, d)
    out = torch.empty_like(x)
    if rows:
        size = next_power_of_2(d)
        centered = "layernorm" in what
        kernels.norm_kernel[(rows,)](
            out, x, delta, weight, bias, d, eps, BD=size, CENTERED=centered, num_warps=warps(size)
        )  # fmt: skip
    return out


def warps(columns: int) -> int:
    """Warps for a row of that many columns: 16 numbers a thread, within 1 to 16 warps; a function of the row alone."""
    return max(1, min(16, columns // 512))


@impl("norm_spans", "triton")
def norm_spans(gpu: Gpu, x: Tensor, weight: Tensor, start: int, span: int, centered: bool, eps: float) -> Tensor:
    rows, width = activations(x, "norm_spans x")
    count = len(tensor(weight, "norm_spans weight", F32, -1))
    if count % span or start + count > width:
        raise ValueError(f"norm_spans: {count} columns from {start} on are not runs of {span} in rows of {width}")
    if rows:
        runs, size = count // span, next_power_of_2(span)
        together = max(1, min(next_power_of_2(runs), 4096 // size))
        kernels.spans_kernel[(rows, cdiv(runs, together))](
            x, weight, width, start, runs, span, eps, BR=together, BS=size, CENTERED=centered,
            num_warps=warps(size * together),
        )  # fmt: skip
    return x


@impl("gated_activation", "triton")
def gated_activation(gpu: Gpu, gate_up: Tensor, kind: str) -> Tensor:
    rows, width = activations(gate_up, "gated_activation gate_up")
    if width % 2:
        raise ValueError(f"gated_activation: {width} columns are not a gate and an up part of one size")
    out = gpu.empty(rows, width // 2, dtype=gate_up.dtype)
    if rows:
        size = _columns(gpu, width // 2)
        kernels.gated_kernel[(rows, cdiv(width // 2, size))](out, gate_up, width // 2, BF=size, KIND=KINDS[kind])
    return out


@impl("activation", "triton")
def activation(gpu: Gpu, x: Tensor, kind: str) -> Tensor:
    rows, d = activations(x, "activation x")
    out = torch.empty_like(x)
    if x.numel():
        size = _columns(gpu, d)
        kernels.activation_kernel[(rows, cdiv(d, size))](out, x, d, BD=size, KIND=KINDS[kind])
    return out


@impl("scale", "triton")
def scale(gpu: Gpu, x: Tensor, factor: float) -> Tensor:
    return _change(gpu, "scale", x, factor, kernels.SCALE.value)


@impl("scale_rows", "triton")
def scale_rows(
    gpu: Gpu, x: Tensor, factors: Tensor, columns: int, positions: Tensor | None = None, step: int = 1, ahead: int = 0
) -> Tensor:
    rows, d = activations(x, "scale_rows x")
    tensor(factors, "scale_rows factors", F32, *factors.shape)
    if positions is not None:
        tensor(positions, "scale_rows positions", I32, rows)
    if x.numel():
        size = _columns(gpu, columns)
        kernels.scale_rows_kernel[(rows, cdiv(columns, size))](
            x, factors, positions, columns, d, factors.numel(), step, ahead, BD=size
        )
    return x


@impl("softcap", "triton")
def softcap(gpu: Gpu, x: Tensor, cap: float) -> Tensor:
    return _change(gpu, "softcap", x, cap, kernels.SOFTCAP.value)


@impl("clip", "triton")
def clip(gpu: Gpu, x: Tensor, limit: float) -> Tensor:
    return _change(gpu, "clip", x, limit, kernels.CLIP.value)


@impl("xielu", "triton")
def xielu(gpu: Gpu, x: Tensor, positive: float, negative: float, beta: float) -> Tensor:
    rows, d = activations(x, "xielu x")
    if x.numel():
        size = _columns(gpu, d)
        kernels.xielu_kernel[(rows, cdiv(d, size))](x, d, positive, negative, beta, BD=size)
    return x


def _change(gpu: Gpu, what: str, x: Tensor, number: float, kind: int) -> Tensor:
    rows, d = activations(x, f"{what} x")
    if x.numel():
        size = _columns(gpu, d)
        kernels.change_kernel[(rows, cdiv(d, size))](x, d, number, BD=size, KIND=kind)
    return x


@impl("add", "triton")
def add(gpu: Gpu, x: Tensor, delta: Tensor) -> Tensor:
    rows, d = activations(x, "add x")
    activations(delta, "add delta", rows, d)
    if x.numel():
        size = _columns(gpu, d)
        kernels.add_kernel[(rows, cdiv(d, size))](x, delta, d, BD=size)
    return x


@impl("embedding", "triton")
def embedding(gpu: Gpu, tokens: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    rows, (vocabulary, d) = len(tensor(tokens, "embedding tokens", I32, -1)), activations(table, "embedding table")
    out = gpu.empty(rows, d, dtype=table.dtype)
    if rows:
        size = _columns(gpu, d)
        grid, other = (rows, cdiv(d, size)), float("nan") if first is None else -0.0
        kernels.embedding_kernel[grid](out, tokens, table, d, -(first or 0), vocabulary, other, BD=size, ADD=False)
    return out


@impl("add_positions", "triton")
def add_positions(gpu: Gpu, x: Tensor, positions: Tensor, table: Tensor, offset: int) -> Tensor:
    rows, d = activations(x, "add_positions x")
    tensor(positions, "add_positions positions", I32, rows)
    length = activations(table, "add_positions table", -1, d)[0]
    if rows:
        size = _columns(gpu, d)
        grid, other = (rows, cdiv(d, size)), float("nan")
        kernels.embedding_kernel[grid](x, positions, table, d, offset, length, other, BD=size, ADD=True)
    return x


@impl("take_rows", "triton")
def take_rows(gpu: Gpu, x: Tensor, delta: Tensor, rows: Tensor | None) -> Tensor:
    total, d = activations(x, "take_rows x")
    activations(delta, "take_rows delta", total, d)
    if rows is None:
        rows = torch.arange(total, dtype=I32, device=x.device)
    count = len(tensor(rows, "take_rows rows", I32, -1))
    out = gpu.empty(count, d)
    if count:
        size = _columns(gpu, d)
        kernels.take_kernel[(count, cdiv(d, size))](out, x, delta, rows, d, BD=size)
    return out


@impl("pick_rows", "triton")
def pick_rows(gpu: Gpu, x: Tensor, rows: Tensor) -> Tensor:
    activations(x, "pick_rows x")
    return x.index_select(0, tensor(rows, "pick_rows rows", I32, -1))


@impl("join_columns", "triton")
def join_columns(gpu: Gpu, parts: tuple[Tensor, ...]) -> Tensor:
    rows, at = parts[0].shape[0], 0
    out = gpu.empty(rows, sum(part.shape[1] for part in parts), dtype=parts[0].dtype)
    for part in parts:
        d = tensor(part, "join_columns part", out.dtype, rows, -1).shape[1]
        if rows:
            size = _columns(gpu, d)
            kernels.place_kernel[(rows, cdiv(d, size))](out, part, d, out.shape[1], at, BD=size)
        at += d
    return out


@impl("take_columns", "triton")
def take_columns(gpu: Gpu, x: Tensor, start: int, width: int) -> Tensor:
    d = activations(x, "take_columns x")[1]
    if start < 0 or start + width > d:
        raise ValueError(f"take_columns: rows of {d} numbers have no columns {start} to {start + width}")
    return x[:, start : start + width].clone(memory_format=torch.contiguous_format)


@impl("place_columns", "triton")
def place_columns(gpu: Gpu, out: Tensor, x: Tensor, at: int) -> Tensor:
    total, width = activations(out, "place_columns out")
    x = x.contiguous()
    rows, d = activations(x, "place_columns x")
    if rows > total or at < 0 or at + d > width:
        raise ValueError(f"place_columns: [{rows}, {d}] from column {at} on is no part of [{total}, {width}]")
    if rows:
        size = _columns(gpu, d)
        kernels.place_kernel[(rows, cdiv(d, size))](out, x, d, width, at, BD=size)
    return out


@impl("lora", "triton")
def lora(gpu: Gpu, x: Tensor, y: Tensor, a: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    count, k = activations(x, "lora x")
    activations(y, "lora y", count)
    slots, rank = tensor(a, "lora a", F32, -1, -1, k).shape[:2]
    tensor(b, "lora b", F32, slots, rank, -1)
    _check_rows(rows, count)
    if not count:
        return y
    sizes, precision = gpu.config("rowwise"), _precision(x)
    h = gpu.empty(count, rank)
    kernels.shrink_kernel[(cdiv(count, sizes["rows"]),)](
        h, x, a, rows, count, k, rank, slots, BM=sizes["rows"], BR=max(16, next_power_of_2(rank)), BK=sizes["columns"],
        PRECISION=precision,
    )  # fmt: skip
    return lora_expand(gpu, h, y, b, rows, start)


@impl("lora_expand", "triton")
def lora_expand(gpu: Gpu, h: Tensor, y: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    count, width = activations(y, "lora_expand y")
    rank = activations(h, "lora_expand h", count)[1]
    slots, _, n = tensor(b, "lora_expand b", F32, -1, rank, -1).shape
    _check_rows(rows, count)
    if start + n > width:
        raise ValueError(f"lora_expand: columns {start}..{start + n} of {width}")
    if count:
        sizes = gpu.config("rowwise")
        kernels.expand_kernel[(cdiv(count, sizes["rows"]), cdiv(n, sizes["columns"]))](
            y, h, b, rows, count, n, rank, width, start, slots, BM=sizes["rows"], BR=max(16, next_power_of_2(rank)),
            BN=sizes["columns"], PRECISION=_precision(y),
        )  # fmt: skip
    return y


@impl("lora_scale", "triton")
def lora_scale(gpu: Gpu, y: Tensor, excess: Tensor, rows: Tensor) -> Tensor:
    count, n = activations(y, "lora_scale y")
    slots = len(tensor(excess, "lora_scale excess", F32, -1, 1, n))
    _check_rows(rows, count)
    if count:
        size = _columns(gpu, n)
        kernels.slot_scale_kernel[(count, cdiv(n, size))](y, excess, rows, n, slots, BD=size)
    return y


def _check_rows(rows: Tensor, count: int) -> None:
    if len(tensor(rows, "lora rows", I32, -1)) < count:
        raise ValueError(f"lora: {len(rows)} adapter numbers for {count} rows")


def _precision(x: Tensor) -> str:
    """Numbers of 16 bits are exact in tf32."""
    return "ieee" if x.dtype is F32 else "tf32"


def _columns(gpu: Gpu, d: int) -> int:
    """Columns of one program where they do not depend on each other."""
    return int(min(next_power_of_2(d), gpu.config("rowwise")["block"]))
