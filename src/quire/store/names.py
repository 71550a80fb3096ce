"""Names of models as the store resolves them: what is here, what can be pulled, and what was probably meant."""

from __future__ import annotations

from pathlib import Path

from quire.core.errors import ModelError
from quire.core.options.values import near_names
from quire.gguf.file import gguf_files
from quire.store.catalog import catalog, known_names, look_up
from quire.store.hub import is_hub_name
from quire.store.manifest import Manifest, all_pulled, marked_default, read
from quire.store.progress import amount

MODEL_SUFFIXES = (".gguf", ".safetensors")
"""What names of files with weights end with."""
PREFERRED = "smollm2"
"""The model that commands without one take where it is here and none was marked."""


def find(name: str) -> Manifest | None:
    """The model of this name in the store; None for one that was not pulled."""
    pick = look_up(name)
    return read(pick.stored_name if pick is not None else name)


def stored_path(name: str) -> Path | None:
    """Where a model of the store lies, by a name of the catalog; None where the catalog does not know the name.

    `ModelError` for a model that was not pulled, or that somebody has removed since.
    """
    pick = look_up(name)
    if pick is None:
        return None
    found = read(pick.stored_name)
    if found is None:
        size = f" ({amount(1e6 * pick.entry.mb)})" if not pick.quantization else ""
        raise ModelError(f"{name} is not on this machine yet. Run: quire pull {name}{size}")
    if not found.place.exists():
        raise ModelError(f"{name}: {found.place} is gone. Run: quire pull {name}")
    return found.place


def local_path(name: str) -> Path:
    """Where a model lies if that is known without asking the hub: of a pulled one its place, else the name as a path,
    which need not exist."""
    path = Path(name).expanduser()
    if path.exists() or (found := find(name)) is None:
        files = gguf_files(path) if path.is_dir() else []
        return files[0] if len(files) == 1 else path
    return found.place


def is_path_name(name: str) -> bool:
    """Whether a name that is on no disk here was meant as a path, and not as one of the hub or of the catalog.

    owner/model/FILE.gguf is a file on the hub, unless a folder `owner` is here.
    """
    if name.startswith(("./", "../", "/", "~")) or name in (".", ".."):
        return True
    parts = name.split("/")
    if len(parts) > 2 and is_hub_name(name):
        return Path(parts[0]).is_dir()
    return len(parts) > 2 or (name.endswith(MODEL_SUFFIXES) and look_up(name) is None)


def missing_path(name: str) -> ModelError:
    """The error for a path where nothing lies."""
    return ModelError(f"{name}: no such file or folder")


def unknown_name(name: str) -> ModelError:
    """The error for what is no model at all."""
    if is_path_name(name):
        return missing_path(name)
    near = near_names(name, known_names())
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ModelError(
        f"{name!r} is neither a folder nor a hub name like owner/model, nor one that quire pull knows "
        f"(quire list --known).{hint}"
    )


def default_model() -> Manifest | None:
    """What commands without a model take: the marked one, else smollm2, else the chat model that was pulled last.

    None where the store has none of these; then it is the bundled model's turn.
    """
    here = {each.name: each for each in all_pulled() if each.place.exists()}
    chats = [each.name for each in here.values() if each.kind == "chat"]
    first = next((name for name in (marked_default(), PREFERRED, *chats) if name in here), None)
    return here[first] if first is not None else None


def several(name: str) -> list[str]:
    """Names of pulled models that lie under the same folder or file as the model `name`."""
    own = read(name)
    return [
        each.name
        for each in all_pulled()
        if own is not None and each.name != name and each.place.resolve() == own.place.resolve()
    ]


def all_known() -> list[tuple[str, str, float, str, str]]:
    """(name, further names, MB, license, kind) of every model of the catalog."""
    return [(name, ", ".join(e.also), e.mb, e.license, e.kind) for name, e in catalog().items()]
