"""Which backend runs and which implementation each op gets, decided from names alone: `quire inspect` needs no torch.
See docs/design/ops.md.

`quire.ops.backend.open_backend` gives the implementations themselves.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError
from quire.ops.lazy import has_torch
from quire.ops.native import load_native, require_native

log = logging.getLogger(__name__)
OPS = (
    "activation", "add", "add_layernorm", "add_positions", "add_rmsnorm", "attention", "attention_states",
    "cache_rows", "causal_conv", "choose_blocks", "choose_pooled", "choose_tokens", "clamped_swiglu", "clip",
    "combine", "copy_blocks", "delta_rule", "embedding", "entry_attention", "expert_mlp", "fold_states",
    "gate_values", "gated_activation", "gated_mlp", "gated_rmsnorm", "grouped_linear", "head_linear",
    "index_rope_and_cache", "join_columns", "latent_attention", "latent_rope_and_cache", "layernorm", "linear",
    "lora", "lora_expand", "lora_scale", "match_lengths", "mix_streams", "move_slots", "ngram_rows", "norm_spans",
    "penalize", "pick_rows", "place_columns", "plain_mlp", "pool_entries", "pool_keys", "rmsnorm", "rope_and_cache",
    "rope_queries", "route", "route_by_token", "sample", "scale", "scale_by_sigmoid", "scale_by_softplus",
    "scale_choices", "scale_columns", "scale_rows", "sinkhorn_gates", "softcap", "sort_by_expert", "sparse_gate",
    "ssm_scan", "take_columns", "take_rows", "top_logprobs", "whole_attention", "xielu", "zero_blocks",
)  # fmt: skip
"""Every op. Each backend implements all of them but those of `HOST`, which a test holds."""
HOST = ("attention_states", "cache_rows", "entry_attention", "fold_states", "pool_entries", "whole_attention")
"""Ops of the reference and of the CPU alone: what spreads a sequence over processes, entries, and attention without a
mask, which is torch's on GPUs."""
READ_WEIGHTS = ("linear", "gated_mlp", "plain_mlp", "grouped_linear", "expert_mlp", "head_linear")
"""Ops that read packed weights."""
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/kfd", "/dev/dxg")
"""Files of the drivers without which Linux has no GPU: NVIDIA's, that of its boards, AMD's, and Windows' under WSL."""


@dataclass(frozen=True)
class BackendFacts:
    """What is known of a backend before it is imported: `DEVICE` of its folder in `quire.ops`.

    `option`: its name for `--device`; `unit` gives the instruction set, or the device's name, and the threads. `extra`:
    of quire, which installs what it `needs` beside what every machine has. It lacks the ops `lacks`; `others` maps an
    op to implementations that `--ops` can name beside the backend's own and the reference.
    """

    option: str
    unit: Callable[[DeviceConfig], tuple[str, int]]
    extra: str = ""
    needs: str = ""
    lacks: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def devices() -> dict[str, BackendFacts]:
    """Name of each backend, which is that of its folder -> what is known of it."""
    folders = importlib.import_module("quire.ops").__path__
    names = [module.name for module in pkgutil.iter_modules(folders) if module.ispkg]
    return {name: importlib.import_module(f"quire.ops.{name}").DEVICE for name in names}


@dataclass(frozen=True)
class Choice:
    """`backend`: the name of its folder; `isa`: instruction set or device; `chosen`: op -> implementation."""

    backend: str
    isa: str
    threads: int
    chosen: Mapping[str, str]

    @property
    def labels(self) -> dict[str, str]:
        """Op -> implementation as it is shown: "cpu/amx"."""
        own = self.backend if self.backend == "reference" else f"{self.backend}/{self.isa}"
        return {op: own if which == self.backend else which for op, which in sorted(self.chosen.items())}


def choose(device: DeviceConfig) -> Choice:
    """What `open_backend` would take for `device`. Where a GPU's driver is, torch is asked for the GPU."""
    name = backend_of(device)
    chosen = choose_ops(name, device.ops)
    return Choice(name, *devices()[name].unit(device), chosen)


def backend_of(device: DeviceConfig) -> str:
    """The backend for `--device`: "triton" for cuda, else that of the same name.

    "auto": the GPU if there is one and Triton, else native if built, else torch with a warning. `ConfigError` where
    none of them is installed.
    """
    if device.device != "auto":
        names = {row.option: name for name, row in devices().items()}
        if device.device not in names:
            raise ConfigError(f"--device {device.device!r} is not one of auto, {', '.join(names)}", param="device")
        return names[device.device]
    if _gpu_runs():
        return "triton"
    if load_native() is not None:
        return "cpu"
    if not has_torch():
        require_native()
    _say_that_native_is_missing()
    return "reference"


@functools.cache
def _say_that_native_is_missing() -> None:
    """Once a process: which backend is asked for several times."""
    log.warning(
        "the native CPU backend (quire._native) was not built: PyTorch's reference runs, about 50 times slower; "
        "install g++ 12 or newer and install quire again, without QUIRE_NATIVE=OFF"
    )


def choose_ops(backend: str, overrides: tuple[str, ...]) -> dict[str, str]:
    """Choose for each op the name of its implementation: the backend's own unless `overrides` says "op=reference"."""
    known = devices()
    wanted = dict(o.partition("=")[::2] for o in overrides)
    for name, which in wanted.items():
        if name not in OPS:
            raise ConfigError(f"--ops {name}={which}: there is no such op; known ops are {', '.join(OPS)}", param="ops")
        offered = ("reference", backend, *known[backend].others.get(name, ()))
        if which in offered:
            continue
        needed = next((row for row in known.values() if which in row.others.get(name, ())), None)
        if needed is not None:
            raise ConfigError(
                f"--ops {name}={which}: needs {needed.needs} (--device {needed.option}); the {backend} backend runs "
                f"here, where {name} is {' or '.join(offered)}",
                param="ops",
            )
        raise ConfigError(
            f"--ops {name}={which}: not on the {backend} backend, where {name} is {' or '.join(offered)}",
            param="ops",
        )
    return {name: backend for name in OPS if name not in known[backend].lacks} | wanted


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
    from quire.ops.triton.gpu import why_no_gpu

    return not why_no_gpu()
