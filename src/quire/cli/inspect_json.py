"""What `quire inspect --json` prints: the tables, and the metadata and tensors of the model's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.cli.show import Rows
from quire.gguf.file import Metadata
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.gguf_tensors import open_files

MOST = 64
"""Values of a list that are shown whole; of a longer one, as a vocabulary is, the first."""
FIRST = 8


def inspected(tables: Mapping[str, Rows], notes: Sequence[str], path: Path) -> str:
    """The JSON of the tables, and of the files at `path`: a GGUF file, or a folder of safetensors.

    Shapes have the slowest axis first, as numpy's do; gguf-dump writes them the other way round.
    """
    told: dict[str, Any] = {title: dict(rows) for title, rows in tables.items()}
    return json.dumps(told | {"notes": list(notes)} | _files(path), indent=2, ensure_ascii=False)


def _files(path: Path) -> dict[str, Any]:
    if path.is_file():
        files = open_files(path)
        listed = (t for file in files for t in file.tensors.values())
        tensors = [{"name": t.name, "type": t.type.name, "shape": list(t.shape)} for t in listed]
        metadata = files[0].metadata
        return {"metadata": {key: _value(metadata, key) for key in metadata}, "tensors": tensors}
    if not any(path.glob("*.safetensors")):
        return {"metadata": {}, "tensors": []}
    infos = Checkpoint(path).infos
    return {
        "metadata": json.loads((path / "config.json").read_text(encoding="utf-8")),
        "tensors": [
            {"name": name, "type": str(info.dtype).removeprefix("torch."), "shape": list(info.shape)}
            for name, info in infos.items()
        ],
    }


def _value(metadata: Metadata, key: str) -> Any:
    """A value of GGUF's metadata as JSON has it; of a long list its length and first values."""
    if (count := metadata.count(key)) is not None and count > MOST:
        return {"length": count, "first": metadata.texts(key, range(FIRST))}
    value = metadata[key]
    if isinstance(value, np.ndarray):
        return value.tolist() if len(value) <= MOST else {"length": len(value), "first": value[:FIRST].tolist()}
    return value.item() if isinstance(value, np.generic) else value
