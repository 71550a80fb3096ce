"""Students of a model: its own layers, fewer of them, or a smaller model of its family that knows nothing yet."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.compress.prune.kept_layers import PER_LAYER_FIELDS, renumbered
from quire.compress.prune.structured import drop_layers
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import open_model
from quire.model.disk.headers import ModelHeaders

INITIALIZER_RANGE = 0.02
"""Of a new model's matrices, where its config has no `initializer_range`."""


def spread_layers(layers: int, kept: int) -> list[int]:
    """List the numbers of `kept` of `layers` layers, evenly spread, the last among them: of half, every other one.

    `ConfigError` where so many cannot be kept.
    """
    if not 1 <= kept <= layers:
        raise ConfigError(f"--layers {kept}: the teacher has {layers}; a student has 1 to {layers} of them")
    return [(i + 1) * layers // kept - 1 for i in range(kept)]


def write_truncated_student(teacher: Net, layers: int, out: Path, dtype: torch.dtype) -> None:
    """Write the teacher with `layers` of its layers to the folder `out` (as DistilBERT begins, Sanh et al. 2019)."""
    tensors, config = drop_layers(teacher.tensors, teacher.config, spread_layers(teacher.spec.layers, layers))
    write_folder(out, tensors, config, teacher.folder, dtype)


def write_random_student(teacher: Net, changes: Mapping[str, Any], seed: int, out: Path, dtype: torch.dtype) -> None:
    """Write a new model of the teacher's family and vocabulary to the folder `out`.

    `changes`: fields of config.json in the family's own spelling, such as `num_hidden_layers`. Matrices are normal
    numbers, norms one, biases zero. `ConfigError` for a field that the config does not have.
    """
    for name in changes:
        if name not in teacher.config:
            raise ConfigError(f"--student {name}: config.json of {teacher.name} has no such field; change one it has")
    config = {**teacher.config, **_kinds(teacher, changes), **changes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        try:
            opened = open_model(folder, "dummy")
        except ModelError as error:
            raise ConfigError(f"--student: {error.message.removeprefix(f'{path}: ')}", param="student") from None
    write_folder(out, _random_tensors(opened, seed), config, teacher.folder, dtype)


def _kinds(teacher: Net, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Cut lists of one entry per layer to the layers that `write_truncated_student` would keep."""
    layers, count = teacher.spec.layers, changes.get("num_hidden_layers")
    if not isinstance(count, int) or not 1 <= count <= layers:
        return {}
    lists = {name: teacher.config.get(name) for name in PER_LAYER_FIELDS}
    kept = spread_layers(layers, count)
    cut = {n: [of[i] for i in kept] for n, of in lists.items() if isinstance(of, list) and len(of) == layers}
    return cut | renumbered(teacher.config, kept)


def _random_tensors(opened: ModelHeaders, seed: int) -> dict[str, Tensor]:
    vectors = {parts["weight"]: role for (role, _), parts in opened.claim.parts.items() if "norm" in role}
    spread = float(opened.config.raw.get("initializer_range", INITIALIZER_RANGE))
    made, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, info in opened.source.infos.items():
        if name in vectors:
            tensors[name] = torch.full(info.shape, float(not opened.spec.stored_less_one(vectors[name])))
        elif len(info.shape) == 1:
            tensors[name] = torch.zeros(info.shape)
        else:
            tensors[name] = torch.randn(info.shape, generator=made) * spread
    return tensors
