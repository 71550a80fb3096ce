"""Matrices of models whose code is transformers': ours in the place of torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.ops.arrays import Array, to_numpy, to_torch
from quire.ops.backend import Ops
from quire.ops.lazy import array_dtype
from quire.ops.weights import Packed, Weight
from quire.quant.base import Quantizer, QWeight, float_kind

EXPERTS = "quire_packed"
BEST = (torch.topk, Tensor.topk)
UNLIKE_TAILS = (torch.sigmoid, Tensor.sigmoid, F.silu, F.gelu, F.softplus, F.elu, F.mish)
"""Functions whose last numbers, which fill no vector register, torch rounds otherwise than the rest (measured)."""


class PackedLinear(nn.Module):
    """A matrix in our format where transformers had an `nn.Linear`: x [..., k] -> [..., n] f32."""

    def __init__(self, ops: Ops, packed: Packed, bias: Array | None) -> None:
        super().__init__()
        self.ops, self.packed, self.offset = ops, packed, bias

    @property
    def weight(self) -> Tensor:
        """No numbers, in the dtype that inputs should have: some code asks for it."""
        return torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of its own: memory of ops is taken back before torch is done with it."""
        self.ops.next_layer()
        rows = self.ops.put(x.reshape(-1, self.packed.k).float().contiguous())
        y = to_torch(self.ops.linear(rows, self.packed, self.offset))
        return y.view(*x.shape[:-1], self.packed.n).clone()


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer: a matrix up (with its gate) and one down each."""

    up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]

    def __call__(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids and weights [T, k] -> [T, hidden]; what is between the matrices is `module`'s."""
        choices = ids.shape[1]
        flat, out = ids.flatten(), torch.empty(ids.numel(), x.shape[1])
        for expert in sorted(set(flat.tolist())):
            rows = (flat == expert).nonzero()[:, 0]
            inner = self.up[expert](x[rows // choices])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            y = self.down[expert](inner)
            out[rows] = module.post_expert_norm(y) if module.has_post_expert_norm else y
        # Added one after another: the order of torch's sum depends on the number of rows.
        parts = (out * weights.float().flatten()[:, None]).view(-1, choices, x.shape[1]).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def packed_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers' expert modules call; arguments as its experts interface has them."""
    found: PackedExperts = module.quire_experts
    return found(module, hidden_states, top_k_index, top_k_weights)


class SameInEveryBatch(TorchFunctionMode):
    """What torch does in an order that depends on the number of rows, done in one that does not.

    Matrices that stay torch's (routers) are multiplied a row at a time; the best of a row come in order of size; and
    what is computed number by number is padded to whole vector registers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is F.linear and args and args[0].dim() > 1:
            x, *rest = args
            rows = [func(row[None], *rest, **named) for row in x.reshape(-1, x.shape[-1])]
            if rows:
                return torch.cat(rows).view(*x.shape[:-1], -1)
        if func in BEST:
            named = named | {"sorted": True}
        if func in UNLIKE_TAILS:
            x, *rest = args
            out = func(F.pad(x.flatten(), (0, -x.numel() % 64)), *rest, **named)
            return out[: x.numel()].view(x.shape)
        return func(*args, **named)


class Packer:
    """Puts our matrices in the place of torch's, one after another, and keeps the account of their bytes.

    Routers (matrices of as many rows as there are experts) stay f32: a choice is all or nothing.
    """

    def __init__(self, ops: Ops, dtype: torch.dtype, target: Quantizer | None, group: int, routers: set[int]) -> None:
        self.ops, self.dtype, self.target, self.group, self.routers = ops, dtype, target, group, routers
        self.nbytes = 0
        self.label = float_kind(array_dtype(dtype))

    def pack(self, model: Any) -> dict[str, tuple[str, int]]:
        """Replace every matrix of `model`; what remains becomes f32. The account of both: what -> (kind, bytes)."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.pytorch_utils import Conv1D

        head = model.get_output_embeddings()
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if type(module) in (nn.Linear, Conv1D):
                    weight = module.weight.detach()
                    weight = weight if type(module) is nn.Linear else weight.t().contiguous()
                    bias = None if module.bias is None else module.bias.detach()
                    setattr(parent, name, self._linear(name, weight, bias, module is head))
            if getattr(parent, "has_gate", None) is not None and isinstance(
                getattr(parent, "down_proj", None), nn.Parameter
            ):
                object.__setattr__(parent, "quire_experts", self._experts(parent))
        if model._can_set_experts_implementation():
            ALL_EXPERTS_FUNCTIONS.register(EXPERTS, packed_experts)
            model.set_experts_implementation(EXPERTS)
        model.float()
        rest = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        return {"matrices": (self.label, self.nbytes), "tables, norms and the rest": ("f32", rest)}

    def _linear(self, name: str, weight: Tensor, bias: Tensor | None, head: bool = False) -> PackedLinear:
        if weight.shape[0] in self.routers:
            made = QWeight(Weight("f32", to_numpy(weight.float())))
        elif self.target is None:
            made = QWeight(Weight(float_kind(array_dtype(self.dtype)), to_numpy(weight.to(self.dtype))))
        else:
            own = self.target.head if head else self.target
            own.check(name, weight.shape[1], self.group)
            made = own.at_pack(to_numpy(weight), self.group)
            self.label = self.label if head else made.label
        packed = made.pack(self.ops)
        self.nbytes += packed.nbytes
        return PackedLinear(self.ops, packed, None if bias is None else self.ops.put(bias.float().clone()))

    def _experts(self, module: Any) -> PackedExperts:
        """The experts of a module that keeps them stacked; torch's are dropped."""
        packed = []
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            stack = getattr(module, name).detach()
            biases = getattr(module, f"{name}_bias").detach() if module.has_bias else (None,) * len(stack)
            matrices = stack.transpose(1, 2) if module.is_transposed else stack
            packed.append(tuple(self._linear(name, w.contiguous(), b) for w, b in zip(matrices, biases, strict=True)))
            delattr(module, name)
        return PackedExperts(*packed)


def expert_counts(config: Any) -> set[int]:
    """Rows of a router's matrix."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {n for name in names if isinstance(n := getattr(config, name, None), int) and n > 1}
