"""Low-rank adapters in training (LoRA, Hu et al. 2022; QLoRA, Dettmers et al. 2023), in PEFT's layout, and merged."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.checkpoint.net import Net
from quire.compress.quantize.fp4 import PackedNf4
from quire.compress.train.parametrized import LinearModule, ParametrizedNet, linear_modules
from quire.core.errors import ConfigError, ModelError
from quire.model.load.adapter_files import LowRank, TableChange, module_of, read_adapter
from quire.model.load.roles import ADAPTED, FUSED
from quire.ops.arrays import to_torch
from quire.training.loop import write_whole

MAX_RANK = 1 << 16


def adaptable_modules(net: Net) -> list[LinearModule]:
    """List the modules that an adapter can change and that the engine serves adapted."""
    return [m for m in linear_modules(net.opened) if ADAPTED.issuperset(FUSED.get(m.role, (m.role,)))]


def target_modules(net: Net, targets: Sequence[str]) -> list[LinearModule]:
    """List the adaptable modules whose name, or its end from a dot on, one of the globs `targets` matches.

    `ConfigError` for a glob that matches none.
    """
    known, found = adaptable_modules(net), dict[str, LinearModule]()
    for target in targets:
        own = [m for m in known if fnmatch.fnmatch(m.module, target) or fnmatch.fnmatch(m.module, f"*.{target}")]
        if not own:
            names = ", ".join(sorted({m.module.rsplit(".", 1)[-1] for m in known}))
            raise ConfigError(f"--targets {target!r} matches no matrix of {net.name}; known: {names}", param="targets")
        found |= {m.name: m for m in own}
    return [m for m in known if m.name in found]


class LoRA:
    """A parametrization: W + alpha / rank * B A for each matrix W [n, k] of `targets`, A [rank, k] random, B [n, rank]
    zero.

    Add `value` to the parametrizations of a `ParametrizedNet`. `parameters`: name of a module -> its matrix, f32.
    """

    def __init__(self, net: Net, targets: Sequence[LinearModule], rank: int, alpha: float, seed: int) -> None:
        self._net, self._targets, self._rank, self._alpha = net, list(targets), rank, alpha
        self._matrices = {m.name: m for m in targets}
        made = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {}
        for m in targets:
            n, k = net.opened.source.infos[m.name].shape[:: -1 if m.transposed else 1]
            # As PEFT begins, so that a rate that works there works here.
            a = (2 * torch.rand(rank, k, generator=made) - 1) / math.sqrt(k)
            self.parameters[f"{m.module}.lora_A.weight"] = a.requires_grad_()
            self.parameters[f"{m.module}.lora_B.weight"] = torch.zeros(n, rank).requires_grad_()

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """Return the changed matrix; other tensors as they are."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return tensor
        a, b = (self.parameters[f"{matrix.module}.lora_{which}.weight"] for which in "AB")
        change = (self._alpha / self._rank) * (b @ a)
        return tensor + (change.t() if matrix.transposed else change)

    def write(self, out: Path, base: str) -> None:
        """Write a folder as PEFT does: adapter_config.json, adapter_model.safetensors. `base`: the model's name."""
        tensors = {f"base_model.model.{name}": p.detach().contiguous() for name, p in self.parameters.items()}
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
            "r": self._rank, "lora_alpha": self._alpha, "lora_dropout": 0.0, "bias": "none",
            "target_modules": self._names(), "fan_in_fan_out": any(m.transposed for m in self._targets),
            "init_lora_weights": True,
        }  # fmt: skip
        write_whole(out / "adapter_model.safetensors", tensors, {"format": "pt"})
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _names(self) -> list[str]:
        """List last names of the modules where these mean no other module, as people write them; else whole names."""
        last = {m.module.rsplit(".", 1)[-1] for m in self._targets}
        meant = {m.module for m in adaptable_modules(self._net) if m.module.rsplit(".", 1)[-1] in last}
        whole = {m.module for m in self._targets}
        return sorted(last if meant == whole else whole)


def quantize_base(net: ParametrizedNet) -> int:
    """Convert the layers' matrices to NF4 codes, one after the other; returns the bytes that they take.

    The head stays as it is, as QLoRA leaves it. `ConfigError` for a matrix that NF4 cannot hold.
    """
    for matrix in linear_modules(net.opened):
        if matrix.layer is not None:
            net.parametrized.frozen[matrix.name] = PackedNf4.of(
                to_torch(net.opened.source.tensor(matrix.name)), matrix.name
            )
            net.parametrized.give_back()
    return sum(codes.nbytes for codes in net.parametrized.frozen.values() if isinstance(codes, PackedNf4))


def merge_adapter(net: Net, adapter: Path) -> None:
    """Set the tensors of `net` to what the adapter in the folder `adapter` makes of them: of every kind that is served.

    `ConfigError` or `ModelError` names what does not fit, or has no place in a checkpoint of this family.
    """
    places = {(m.role, m.layer): m for m in adaptable_modules(net) if m.layer is not None}
    file = read_adapter(adapter, net.opened, [(role, layer) for role, layer in places if layer is not None], MAX_RANK)
    for (role, layer), low in file.matrices.items():
        matrix = places[role, layer]
        w = net.tensors[matrix.name]
        new = _changed(w.t() if matrix.transposed else w, low)
        net.set(matrix.name, (new.t().contiguous() if matrix.transposed else new).to(w.dtype))
        if low.bias is not None:
            _add_bias(net, matrix.name.removesuffix("weight") + "bias", to_torch(low.bias), adapter)
    _merge_tables(net, {"embed": file.embed, "head": file.head}, adapter)


def _changed(w: Tensor, low: LowRank) -> Tensor:
    """Add B A to w [n, k], in f64, and bring rows to their norms where there are any (DoRA)."""
    new = w.double() + to_torch(low.b).double() @ to_torch(low.a).double()
    return new if low.magnitude is None else new * (to_torch(low.magnitude).double() / new.norm(dim=1))[:, None]


def _add_bias(net: Net, name: str, bias: Tensor, adapter: Path) -> None:
    if name not in net.tensors:
        raise ModelError(f"{adapter}: has a bias {name}, and the model has none there; serve it as an adapter")
    net.set(name, (net.tensors[name].double() + bias.double()).to(net.tensors[name].dtype))


def _merge_tables(net: Net, changes: Mapping[str, TableChange], adapter: Path) -> None:
    """Merge the embedding table and the head. One tensor that is both must be changed as both."""
    names = {role: net.opened.claim.get(role).get("weight") for role in changes}
    made = {}
    for role, change in changes.items():
        name = names[role] or names["embed"]
        assert name is not None
        w = net.tensors[name]
        new = w.clone()
        if change.low is not None:
            new = _changed(w.t(), change.low).t() if role == "embed" else _changed(w, change.low)
        elif change.own is not None:
            new = to_torch(change.own)
        elif change.rows is not None:
            new[list(change.tokens)] = to_torch(change.rows).to(w.dtype)
        if change.own_bias is not None or (change.low is not None and change.low.bias is not None):
            raise ModelError(f"{adapter}: {module_of(net.opened, role)} gets a bias; serve it as an adapter")
        made[role] = name, new.to(w.dtype).contiguous()
    if made["embed"][0] == made["head"][0] and not torch.equal(made["embed"][1], made["head"][1]):
        raise ModelError(
            f"{adapter}: changes the table of tokens and the head, which are one here, unlike; serve it as an adapter"
        )
    for role, change in changes.items():
        if not change.nothing:
            net.set(*made[role])
