"""Layers of drafting heads, computed in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from quire.ops.arrays import to_torch
from speculation_methods import PYDOC


def hidden_states(tokens: list[int]) -> tuple[Tensor, ...]:
    """transformers' of the embedded model: the stream before each layer, then past the last norm; each [n, hidden]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    with torch.no_grad():
        return tuple(h[0] for h in model(torch.tensor([tokens]), output_hidden_states=True).hidden_states)


def relative(found: Tensor, want: Tensor) -> float:
    return float((to_torch(found) - want).abs().max() / want.abs().max())


def turned(x: Tensor) -> Tensor:
    """x [n, heads, d] with rotary positions 0.. of base 10,000."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] / 10000.0 ** (torch.arange(0, d, 2) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def layer_by_hand(w: dict[str, Tensor], base: str, x: Tensor, h: Tensor, head_dim: int = 64) -> Tensor:
    """A Llama layer with two queries a key over rows h, added to the stream x [n, hidden]."""
    n, hidden = x.shape
    q, k, v = ((h @ w[f"{base}.self_attn.{name}_proj.weight"].T).view(n, -1, head_dim) for name in ("q", "k", "v"))
    q, k, v = (t.transpose(0, 1) for t in (turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.transpose(0, 1).reshape(n, hidden) @ w[f"{base}.self_attn.o_proj.weight"].T
    h = rms(x, w[f"{base}.post_attention_layernorm.weight"])
    gate, up = (h @ w[f"{base}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (silu(gate) * up) @ w[f"{base}.mlp.down_proj.weight"].T
