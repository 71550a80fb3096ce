"""Muon for the hidden matrices, Adam for everything else, and the learning-rate schedule."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 3e-3
MUON_MOMENTUM = 0.95
WARMUP = 0.02


def rate_factor(progress: float, code_share: float) -> float:
    """Return the share of the full learning rate: short warm-up, constant for code, then linear to zero."""
    if progress < WARMUP:
        return max(progress, 1e-3) / WARMUP
    return 1.0 if progress < code_share else max(0.0, (1.0 - progress) / (1.0 - code_share))


def orthogonalized(stack: Tensor) -> Tensor:
    """Move each matrix's singular values near one with five Newton-Schulz steps."""
    x = stack.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: Tensor = x.mT if tall else x
    return result.to(stack.dtype)


@dataclass
class Muon:
    """Momentum whose update is orthogonalized; matrices of one shape are handled together."""

    named: dict[str, nn.Parameter]
    momentum: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start every momentum at zero."""
        self.momentum = {name: torch.zeros_like(value) for name, value in self.named.items()}
        self.groups: dict[torch.Size, list[str]] = defaultdict(list)
        for name, value in self.named.items():
            self.groups[value.shape].append(name)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the matrices from their gradients."""
        for shape, names in self.groups.items():
            gradients = torch.stack([_gradient(self.named[name]) for name in names])
            held = torch.stack([self.momentum[name] for name in names])
            held.lerp_(gradients, 1 - MUON_MOMENTUM)
            update = orthogonalized(gradients.lerp_(held, MUON_MOMENTUM))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for index, name in enumerate(names):
                self.momentum[name].copy_(held[index])
                self.named[name].sub_(update[index], alpha=scale)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Optimizer:
    """Both optimizers behind one step, with a state that fits a safetensors file."""

    def __init__(self, model: nn.Module) -> None:
        hidden = {name: p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
        self.others = {name: p for name, p in model.named_parameters() if name not in hidden}
        self.muon = Muon(hidden)
        self.adam = torch.optim.Adam(self.others.values(), lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10)

    def step(self, factor: float) -> None:
        """Apply the gradients at this share of the full learning rate, then clear them."""
        self.muon.step(MUON_RATE * factor)
        self.adam.param_groups[0]["lr"] = ADAM_RATE * factor
        self.adam.step()
        for parameter in (*self.muon.named.values(), *self.others.values()):
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that a resumed run needs."""
        state = {f"muon.{name}": value for name, value in self.muon.momentum.items()}
        for name, parameter in self.others.items():
            for key, value in self.adam.state[parameter].items():
                state[f"adam.{key}.{name}"] = value
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` returned."""
        for name, value in self.muon.momentum.items():
            value.copy_(state[f"muon.{name}"])
        for name, parameter in self.others.items():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.adam.state[parameter] = {key: state[f"adam.{key}.{name}"].clone() for key in keys}
