"""Layers that a checkpoint has beyond those of its config: a model that was cut short may keep them in its file."""

from __future__ import annotations

import re

from quire.model.disk.checkpoint import TensorInfo
from quire.model.disk.claim import unread
from quire.model.families.row import Family
from quire.model.spec import ModelSpec


def drop_layers_beyond(infos: dict[str, TensorInfo], spec: ModelSpec, family: Family) -> list[str]:
    """Take the tensors of layers beyond the config's out of `infos`, as transformers does; a note that says which."""
    notes, kept = list[str](), unread(spec, family)
    for stack, count in (("layer", spec.layers), ("encoder_layer", spec.encoder.layers)):
        if stack not in family.names or not count:
            continue
        before, after = map(re.escape, family.names[stack].split("{}", 1))
        found = re.compile(rf"{before}(\d+){after}")
        layers = {n: int(m[1]) for n in infos if (m := found.match(n)) and int(m[1]) >= count}
        layers = {name: layer for name, layer in layers.items() if not name.startswith(kept)}
        for name in layers:
            del infos[name]
        if layers:
            numbers = sorted(set(layers.values()))
            notes.append(
                f"config.json has {count} layers; the files' layers {', '.join(map(str, numbers[:6]))}"
                f"{' and more' if len(numbers) > 6 else ''} ({len(layers)} tensors) are ignored"
            )
    return notes
