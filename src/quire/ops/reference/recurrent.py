"""Ops of layers with a recurrent state: the gated delta rule, selective scans, and the gated norm behind them.

The definitions are the recurrences, one row after the other, in f32. `quire.ops.recurrent` says which states are read
and stored. Rows depend on the rows of their own sequence and on its state alone; a state that was stored and is read
back goes on as if it had not been. Backends keep that to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch
from quire.ops.reference.layers import rmsnorm


@op(tolerance=2e-5, into="states")
def delta_rule(
    qkv: Tensor, gates: Tensor, decay: Tensor | None, states: Tensor, batch: StateBatch, spec: DeltaSpec
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang et al. 2024): (states, those of `batch` stored; o f32 [T, value_heads * value_dim]).

    qkv f32 [T, spec.width]: queries, keys and values of all heads, after the convolution. Queries and keys are divided
    by their length, sqrt(x . x + 1e-6), and queries by sqrt(key_dim), too. gates f32 [T, 2 * value_heads]: what beta is
    made of (b), then what decays are made of (a). Where each channel has a decay (Kimi Linear) they are of `decay` f32
    [T, value_heads * key_dim], and gates is b alone, [T, value_heads]. states f32 [slots, value_heads, key_dim,
    value_dim]. Of each head: S *= decay; d = beta (v - S^T k); S += k d^T; o = S^T q.
    """
    nk, nv, dk, dv = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    q, k, v = qkv[:, : nk * dk], qkv[:, nk * dk : 2 * nk * dk], qkv[:, 2 * nk * dk :]
    q = _unit(q, nk).repeat_interleave(nv // nk, 1) * dk**-0.5
    k = _unit(k, nk).repeat_interleave(nv // nk, 1)
    v = v.reshape(len(v), nv, dv)
    beta = spec.beta_scale * gates[:, :nv].sigmoid()[..., None]
    each = (gates[:, nv:] if decay is None else decay) + spec.dt_bias
    kept = _log_decay(each.view(len(qkv), nv, each.shape[1] // nv), spec).exp()[..., None]

    def advance(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * kept[t]
        d = beta[t] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * d[:, None]
        return state, torch.einsum("hkv,hk->hv", state, q[t])

    return _walk(states, batch, advance, v)


@op(tolerance=2e-5, into="states")
def ssm_scan(
    x: Tensor, bc: Tensor | None, dt: Tensor | None, states: Tensor, batch: StateBatch, spec: ScanSpec
) -> tuple[Tensor, Tensor]:
    """A selective scan (Mamba: Gu and Dao 2023; Mamba-2: Dao and Gu 2024): (states, those of `batch` stored; y).

    x f32 [T, inner] after the convolution; bc f32 [T, 2 * groups * state]: B, then C; None: x has these columns behind
    its own. dt f32 [T, heads], or [T, inner] of Mamba-1; None: all are 1 (Lightning Attention). states f32 [slots,
    heads, state, head_dim]. Of each head, with dt = limited(softplus(dt + dt_bias)): S = S exp(dt a) + B (dt x)^T; y =
    S^T C + d x, f32 [T, inner].
    """
    n, heads = spec.state, spec.heads
    if bc is None:
        x, bc = x[:, : spec.inner], x[:, spec.inner :]
    both = bc.reshape(len(x), 2, spec.groups, n).repeat_interleave(heads // spec.groups, 2)
    b, c = both[:, 0], both[:, 1]
    if dt is None:
        step = torch.ones((len(x), spec.steps))
    else:
        step = F.softplus(dt if spec.dt_bias is None else dt + spec.dt_bias).clamp(spec.low, spec.high)
    step = step.view(len(x), heads, spec.steps // heads)
    kept = (step[:, :, None] * (spec.a if spec.selective else spec.a[:, None, None])).exp()
    rows = x.reshape(len(x), heads, spec.head_dim)

    def advance(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * kept[t] + b[t][..., None] * (step[t] * rows[t])[:, None]
        return state, torch.einsum("hnp,hn->hp", state, c[t])

    states, y = _walk(states, batch, advance, rows)
    return states, y if spec.d is None else y + spec.d.repeat_interleave(spec.inner // len(spec.d)) * x


@op(tolerance=4e-6, into="x")
def gated_rmsnorm(
    x: Tensor, z: Tensor, weight: Tensor | None, span: int, gate: str, gate_first: bool, eps: float
) -> Tensor:
    """x = rmsnorm(x) * weight * gate(z) in place, each run of `span` columns normed by itself; returns x [T, width].

    `gate` is "silu" or "sigmoid". `gate_first`: it multiplies what is normed instead of the result (Mamba-2). weight
    f32 [width], or [span] for every run; None: no norm, the gate alone. z f32 [T, width]; its rows may lie apart: it
    may be some columns of a matrix.
    """
    factor = F.silu(z) if gate == "silu" else z.sigmoid()
    if weight is None:
        return x * factor
    runs = (x * factor if gate_first else x).reshape(len(x), x.shape[1] // span, span)
    normed = (rmsnorm(runs, torch.ones(span), eps) * weight.view(-1, span)).flatten(1)
    return normed if gate_first else normed * factor


def _walk(
    states: Tensor, batch: StateBatch, advance: Callable[[Tensor, int], tuple[Tensor, Tensor]], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Every row after the one before it: the states, and the outputs, as wide as `like` [T, heads, n]; zeros for rows
    of no sequence, which pad a step.

    advance(state, row) gives the state after a row, and the row's output.
    """
    ends, stored, outputs = batch.cu_q.tolist(), dict[int, Tensor](), [like[:0]]
    counts, target = batch.counts.tolist(), batch.target.tolist()
    for s, source in enumerate(batch.source.tolist()):
        state = states[source] if source >= 0 else torch.zeros(states.shape[1:], dtype=states.dtype)
        for row in range(ends[s], ends[s + 1] + 1):
            places = [slot for slot, n in zip(target[s], counts[s], strict=True) if slot >= 0 and n == row - ends[s]]
            stored |= dict.fromkeys(places, state)
            if row < ends[s + 1]:
                state, output = advance(state, row)
                outputs.append(output[None])
    if stored:
        states = states.clone()
        for slot, state in stored.items():
            states[slot] = state
    return states, torch.cat((*outputs, torch.zeros_like(like[ends[-1] :]))).flatten(1)


def _unit(x: Tensor, heads: int) -> Tensor:
    """x [T, heads * d] as [T, heads, d], each divided by its length."""
    each = x.reshape(len(x), heads, x.shape[1] // heads)
    return each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6)


def _log_decay(x: Tensor, spec: DeltaSpec) -> Tensor:
    """Logarithms of decays [T, value_heads, n] of what is computed of rows, biases included."""
    a: Tensor = spec.a[:, None]
    return spec.lower_bound * (-a * x).sigmoid() if spec.lower_bound < 0 else a * F.softplus(x)
