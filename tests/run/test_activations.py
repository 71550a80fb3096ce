"""Memory of a step's intermediate tensors: what is reserved is what steps take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_variants import GEMMA3N
from oracle import write
from paged_model import Paged, load, prompt
from quire.core.config import DeviceConfig
from quire.ops.backend import open_backend
from quire.ops.cpu.state import Arena
from quire.run.activations import activations
from sparse_variants import SPARSE

WIDE = {"hidden_size": 512}
"""Wide beside what only these families have, which is not counted."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one stream": ("llama", WIDE),
    "hyper-connections": ("hy_v4", SPARSE["hy_v4"][1] | WIDE),
    "AltUp": ("gemma3n_text", GEMMA3N | WIDE),
}


@pytest.mark.parametrize("variant", MODELS)
def test_layers_take_what_is_reserved_for_them(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, facts = MODELS[variant]
    write(tmp_path, family, **facts)
    ops, rows = open_backend(DeviceConfig(device="cpu")), 48
    run = Paged(load(tmp_path, ops), [prompt(rows, 1)])
    room, taken, empty = activations(run.model.spec, rows, rows), [0, 0, 0], Arena.empty
    ops.reserve(1 << 26, 1 << 26)

    def counted(self: Arena, *args: Any) -> Any:
        made = empty(self, *args)
        taken[:] = map(max, taken, self._used)
        return made

    monkeypatch.setattr(Arena, "empty", counted)
    run.step([rows])
    assert 0.9 * room.outer <= taken[0] <= 1.05 * room.outer
    assert 0.9 * max(room.layer, room.last) <= max(taken[1:]) <= 1.05 * max(room.layer, room.last)
