"""EAGLE-3's layer in training (Li et al. 2025), with their training-time test: it learns to read its own output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softmax

from quire.model.net.hidden_taps import Taps
from quire.model.spec import ModelSpec
from quire.speculate.train.target import Target, divergence

DECAY = 0.8
"""Weight of a pass's loss beside that of the one before it."""
MOST_KNOWN = 32000
"""Tokens that the head knows at most: those that the text has most often."""
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
EPS = 1e-5
THETA = 10000.0


class Eagle3Layer(nn.Module):
    """The layer, drafting `passes` tokens; its head knows the tokens `ids` of the target.

    It begins as the target's late row under the target's head, nearly.
    """

    def __init__(self, target: Target, passes: int, ids: Tensor) -> None:
        super().__init__()
        spec = target.spec
        self.spec, self.passes, self.ids = spec, passes, ids
        hidden, inner = spec.hidden, spec.intermediate
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        self.head_dim = spec.head_dim
        self.embed, own = target.matrices()
        width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {"fc": (hidden, 3 * hidden), "self_attn.q_proj": (width, 2 * hidden),
                  "self_attn.k_proj": (kv, 2 * hidden), "self_attn.v_proj": (kv, 2 * hidden),
                  "self_attn.o_proj": (hidden, width), "mlp.gate_proj": (inner, hidden),
                  "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}  # fmt: skip
        self.w = nn.ParameterDict({n.replace(".", "/"): torch.randn(s) * s[1] ** -0.5 for n, s in shapes.items()})
        for norm in NORMS:
            self.w[norm] = torch.ones(hidden)
        self.w["lm_head"] = own[ids].clone()
        with torch.no_grad():
            for name in ("self_attn/o_proj", "mlp/down_proj"):
                self.w[name] *= 0.1
            self.w["fc"] *= 0.1
            self.w["fc"][:, 2 * hidden :] += torch.eye(hidden)  # 1.36 tokens a step, not 1.29, at 150 steps

    def loss(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """hidden [n, 3 * hidden], logits [n, V] of the target's rows: pass j at position p says what row p + 1 says.

        A pass at p begins at p - j with the target's row; keys of later positions are those of the passes since.
        """
        wanted = softmax(logits[1:, self.ids], -1)
        embedded = self.embed[tokens[1:]]
        x = hidden[:-1] @ self.w["fc"].T
        keys, values = list[Tensor](), list[Tensor]()
        total = torch.zeros(())
        for j in range(self.passes):
            if j:  # the layer's own output of the position before; those that began before the text are left out
                x = x.roll(1, 0)
            x = self._layer(embedded, x, keys, values)
            said = _norm(x, self.w["norm"]) @ self.w["lm_head"].T
            total = total + DECAY**j * divergence(said[j:], wanted[j:])
        return total

    def _layer(self, embedded: Tensor, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """A pass over all positions; its keys and values [heads, n, d] join those of the passes before."""
        w, n = self.w, len(x)
        h = torch.cat((_norm(embedded, w["input_layernorm"]), _norm(x, w["hidden_norm"])), 1)
        q, k, v = ((h @ w[f"self_attn/{p}_proj"].T).view(n, -1, self.head_dim).transpose(0, 1) for p in "qkv")
        times = self.heads // self.kv_heads
        keys.append(_turned(k).repeat_interleave(times, 0))
        values.append(v.repeat_interleave(times, 0))
        j = len(keys) - 1
        q = _turned(q) * self.head_dim**-0.5
        # Of the first pass: keys up to where this one began. Of later ones: the one key on the way from there.
        seen = torch.ones(n, n, dtype=torch.bool).tril(-j)
        scores = [(q @ keys[0].transpose(1, 2)).masked_fill(~seen, -math.inf)]
        scores += [(q * keys[i].roll(j - i, 1)).sum(-1, keepdim=True) for i in range(1, j + 1)]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :n] @ values[0]
        for i in range(1, j + 1):
            out = out + weights[..., n + i - 1 : n + i] * values[i].roll(j - i, 1)
        x = x + out.transpose(0, 1).reshape(n, -1) @ w["self_attn/o_proj"].T
        h = _norm(x, w["post_attention_layernorm"])
        inner: Tensor = silu(h @ w["mlp/gate_proj"].T) * (h @ w["mlp/up_proj"].T)
        added: Tensor = x + inner @ w["mlp/down_proj"].T
        return added

    def layout(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors as the authors of EAGLE-3 publish them."""
        spec, known = self.spec, len(self.ids)
        outer = ("fc", "norm", "lm_head")
        names = {n: n.replace("/", ".") if n in outer else f"midlayer.{n.replace('/', '.')}" for n in self.w}
        tensors: dict[str, Tensor] = {f"{names[n]}.weight": self.w[n] for n in self.w}
        t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
        t2d[self.ids] = True
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": spec.hidden, "intermediate_size": spec.intermediate, "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab_size,
            "draft_vocab_size": known, "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
            "max_position_embeddings": spec.max_position, "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(read_before(spec.layers))},
        }  # fmt: skip
        return config, tensors | {"d2t": self.ids - torch.arange(known), "t2d": t2d}


def read_before(layers: int) -> tuple[int, int, int]:
    """Before which layers of the target it reads: early, middle, and the last, which knows most of the next token."""
    return min(2, layers - 1), layers // 2, layers - 1


def taps_of(spec: ModelSpec) -> Taps:
    """The target's rows that it reads."""
    return Taps(read_before(spec.layers), every=True)


def frequent(rows: list[list[int]], vocab_size: int) -> Tensor:
    """The tokens [n] that `rows` have, ascending, the most frequent where they are many; all of a small vocabulary.

    Tokens that the text lacks are not worth their share of the head (FR-Spec, Zhao et al. 2025).
    """
    if vocab_size <= MOST_KNOWN:
        return torch.arange(vocab_size)
    counts = torch.bincount(torch.tensor(rows).flatten(), minlength=vocab_size)
    known = min(MOST_KNOWN, int((counts > 0).sum()))
    return counts.argsort(descending=True, stable=True)[:known].sort().values


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of rows."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _turned(x: Tensor) -> Tensor:
    """x [heads, n, d] with rotary positions 0.. (Su et al. 2021)."""
    n, d = x.shape[1:]
    angles = torch.arange(n)[:, None] / THETA ** (torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
