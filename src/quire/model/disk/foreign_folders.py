"""What a folder without config.json holds: models of others' formats, parts of models, or nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from quire.core.errors import ModelError
from quire.model.disk.hf_config import read_json

NEEDED = "a model folder in Hugging Face format is needed"
ADAPTER, PIPELINE = "adapter_config.json", "model_index.json"
OTHERS = {
    "*.onnx": "ONNX files; give the folder that they were made of",
    "openvino_model.xml": "a model of OpenVINO; give the folder that it was made of",
    "params.json": "files in their maker's own format (params.json); the hub has most such models with a config.json",
    "*.gguf": "GGUF files, of which none is a model of text or the first of its parts; name the one that is",
    "*.safetensors": "weights without a config.json; copy that of the model beside them",
    "*.bin": "PyTorch files without a config.json; give a folder that has it, and *.safetensors",
}
"""Pattern of files -> what they are, and what to do."""


def without_config(folder: Path) -> str:
    """What a folder that has no config.json holds, and what to do."""
    if not any(folder.iterdir()):
        return f"the folder is empty; {NEEDED}"
    if (folder / PIPELINE).is_file():
        name = _said(folder / PIPELINE, "_class_name", "of no name")
        return f"the folder holds a diffusion pipeline ({name}); only models that make text run here"
    if (folder / ADAPTER).is_file():
        base = _said(folder / ADAPTER, "base_model_name_or_path", f"a model that {ADAPTER} does not name")
        return f"the folder holds an adapter of {base}; run that model with --enable-lora --lora-modules NAME={folder}"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inner:
        return f"folders in it have one: {', '.join(inner[:6])}; name one of them"
    held = next((what for pattern, what in OTHERS.items() if any(folder.glob(pattern))), "")
    return f"the folder holds {held}" if held else NEEDED


def _said(path: Path, field: str, otherwise: str) -> str:
    """A word of a JSON file, `otherwise` where it has none."""
    with suppress(ModelError):
        found = read_json(path).get(field)
        if isinstance(found, str) and found:
            return f"{found:.100}"
    return otherwise
