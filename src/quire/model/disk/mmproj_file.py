"""The mmproj file of a GGUF model: the one that was named, or that lies in the folder that was given."""

from __future__ import annotations

from pathlib import Path

from quire.core.errors import ConfigError, ModelError
from quire.gguf.file import is_gguf
from quire.gguf.mmproj import Mmproj, mmproj_beside
from quire.store.hub import Hub, download, is_hub_name


def find_mmproj(model: str, path: Path, hub: Hub, notes: list[str]) -> Mmproj | None:
    """What makes rows of images for the GGUF model `path`, which `model` stands for; None where there is nothing.

    A file that `hub.mmproj` names must be one that can be read. Where it is None and `model` names no file, but a
    folder or a model of the hub or store, the one that lies there is taken; `notes` say why none is.
    """
    found = None if hub.mmproj == "" else Mmproj.open(_named(hub)) if hub.mmproj else _beside(model, path, notes)
    if found is not None and found.get("has_audio_encoder", False):
        notes.append(f"no audio is taken: what {found.file.path.name} has for it is left out")
    return found


def _beside(model: str, path: Path, notes: list[str]) -> Mmproj | None:
    """The one file that lies beside the model, if `model` names no file."""
    if is_gguf(Path(model).expanduser()) or model.endswith(".gguf"):
        return None
    found = mmproj_beside(path)
    if len(found) > 1:
        named = ", ".join(each.name for each in found)
        notes.append(f"no images are taken: {path.parent} holds several files for them; name one by --mmproj: {named}")
    if len(found) != 1:
        return None
    try:
        return Mmproj.open(found[0])
    except ModelError as error:
        notes.append(f"no images are taken: {error.message}")
        return None


def refuse_mmproj(hub: Hub, model: str) -> None:
    """`ConfigError` where a file is named for a model that is not in GGUF."""
    if hub.mmproj:
        raise ConfigError(
            f"--mmproj is for GGUF files; {model} has its vision encoder in its own files, if it takes images: leave "
            "--mmproj out",
            param="mmproj",
        )


def _named(hub: Hub) -> Path:
    """The file that `--mmproj` names: a path, or a file on the hub."""
    name = hub.mmproj or ""
    path = Path(name).expanduser()
    if path.is_dir():
        found = mmproj_beside(path / "mmproj")
        if len(found) != 1:
            there = ", ".join(each.name for each in found) or "no file mmproj*.gguf"
            raise ConfigError(f"--mmproj {name}: the folder holds {there}; name one file", param="mmproj")
        return found[0]
    if path.exists() or not (is_hub_name(name) and name.endswith(".gguf")):
        return path
    return download(name, Hub(None, hub.folder))
