"""Which backend runs and which implementation each op gets, decided from names alone: `quire inspect` needs no torch.

`quire.ops.select` gives the implementations themselves.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError
from quire.ops.lazy import has_torch
from quire.ops.native import Native, load_native, require_native

OPS = (
    "activation", "add", "add_layernorm", "add_positions", "add_rmsnorm", "attention", "attention_states", "cache_rows",
    "clamped_swiglu", "clip", "combine", "copy_blocks", "embedding", "expert_mlp", "fold_states", "gated_activation",
    "gated_mlp", "grouped_linear",
    "head_linear", "join_columns", "latent_attention", "latent_rope_and_cache", "layernorm", "linear", "lora",
    "lora_expand", "lora_scale", "move_slots", "norm_spans", "penalize", "pick_rows", "place_columns", "plain_mlp",
    "rmsnorm",
    "rope_and_cache", "rope_queries", "route", "sample", "scale", "scale_by_sigmoid", "softcap", "sort_by_expert",
    "take_columns",
    "take_rows", "top_logprobs", "whole_attention", "zero_blocks",
)  # fmt: skip
"""Every op. Each backend implements all of them but those of `HOST`, which a test holds."""
HOST = ("attention_states", "cache_rows", "fold_states", "whole_attention")
"""Ops of the reference and of the CPU alone: what spreads a sequence over processes, which GPUs refuse, and attention
without a mask, which is torch's there."""
OTHERS = {"triton": {"linear": ("cublas", "cusparselt")}}
"""Backend -> op -> implementations that `--ops` can name beside the backend's own and the reference."""
READ_WEIGHTS = ("linear", "gated_mlp", "plain_mlp", "grouped_linear", "expert_mlp", "head_linear")
"""Ops that read packed weights."""
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/kfd", "/dev/dxg")
"""Files of the drivers without which Linux has no GPU: NVIDIA's, that of its boards, AMD's, and Windows' under WSL."""


@dataclass(frozen=True)
class Choice:
    """`backend` "cpu", "triton" or "reference"; `isa`: instruction set or device; `chosen`: op -> implementation."""

    backend: str
    isa: str
    threads: int
    chosen: Mapping[str, str]

    @property
    def labels(self) -> dict[str, str]:
        """Op -> implementation as it is shown: "cpu/amx"."""
        unit = {"cpu": f"cpu/{self.isa}", "triton": f"triton/{self.isa}", "reference": "reference"}
        return {op: unit.get(which, which) for op, which in sorted(self.chosen.items())}


def choose(device: DeviceConfig) -> Choice:
    """What `select` would take for `device`. Where a GPU's driver is, torch is asked for the GPU."""
    name = backend_of(device)
    chosen = choose_ops(name, device.ops)
    if name == "cpu":
        native = Native(device.isa, device.threads)
        return Choice(name, native.isa, native.threads, chosen)
    if name == "triton":
        from quire.ops.gpu import open_gpu

        return Choice(name, open_gpu().name, 1, chosen)
    return Choice(name, "torch", 1, chosen)


def backend_of(device: DeviceConfig) -> str:
    """The backend for `--device`: "triton" for cuda, "cpu" native, "reference" torch.

    "auto": the GPU if there is one and Triton, else native if built, else torch with a warning. `ConfigError` where
    none of them is installed.
    """
    if device.device != "auto":
        names = {"cuda": "triton", "cpu": "cpu", "reference": "reference"}
        if device.device not in names:
            raise ConfigError(f"--device {device.device!r} is not one of auto, {', '.join(names)}", param="device")
        return names[device.device]
    if _gpu_runs():
        return "triton"
    if load_native() is not None:
        return "cpu"
    if not has_torch():
        require_native()
    warnings.warn(
        "quire._native is not built: running on the slow torch reference (install g++ and reinstall quire)",
        RuntimeWarning,
        stacklevel=3,
    )
    return "reference"


def choose_ops(backend: str, overrides: tuple[str, ...]) -> dict[str, str]:
    """For each op the name of its implementation: the backend's own unless `overrides` says "op=reference"."""
    wanted = dict(o.partition("=")[::2] for o in overrides)
    others = OTHERS.get(backend, {})
    for name, which in wanted.items():
        if name not in OPS:
            raise ConfigError(f"--ops {name}={which}: there is no such op; known ops are {', '.join(OPS)}", param="ops")
        offered = ("reference", backend, *others.get(name, ()))
        if which in OTHERS["triton"].get(name, ()) and which not in offered:
            raise ConfigError(
                f"--ops {name}={which}: needs a GPU (--device cuda); the {backend} backend runs here, where {name} is "
                f"{' or '.join(offered)}",
                param="ops",
            )
        if which not in offered:
            raise ConfigError(
                f"--ops {name}={which}: not on the {backend} backend, where {name} is {' or '.join(offered)}",
                param="ops",
            )
    own = {name: backend for name in OPS if backend != "triton" or name not in HOST}
    return own | wanted


def _gpu_runs() -> bool:
    if sys.platform == "linux" and not any(Path(file).exists() for file in DRIVERS):
        return False
    if not has_torch():
        warnings.warn(
            "a GPU is there, but PyTorch is not installed: running on the CPU (pip install 'quire[gpu]')",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    from quire.ops.gpu import why_no_gpu

    return not why_no_gpu()
