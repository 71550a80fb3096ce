"""Models on the Hugging Face hub: how they are named, which of their files are downloaded, and why they are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.core.files import SHARD, shard_number

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<kind>\w+)|/(?P<file>[\w./-]+\.gguf))?")
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
"""Weights, configuration, chat templates, and vocabularies in every form."""
ENDS = (".gguf", "-*-of-*.gguf")
"""Of the names of GGUF files: of a model in one, and in several."""
MMPROJ = "*mmproj*[-._][Ff]16.gguf"
"""Of the file that makes rows of images, which repositories have in several formats."""


class Hub(NamedTuple):
    """Which `revision` of a model (a branch, tag or commit; None = the newest), and the `folder` of downloads.

    `mmproj`: the file that makes rows of images for a GGUF model; None = that which lies beside it, "" = none.
    """

    revision: str | None = None
    folder: str | None = None
    mmproj: str | None = None


NEWEST = Hub()


def hub_of(options: ModelConfig) -> Hub:
    """Revision, folder and mmproj file for the model itself."""
    return Hub(options.revision, options.download_dir, "" if options.language_model_only else options.mmproj)


def hub_beside(options: ModelConfig) -> Hub:
    """Revision and folder for what is loaded beside the model, which has revisions of its own."""
    return Hub(None, options.download_dir)


def is_hub_name(name: str) -> bool:
    """Whether it is owner/model, or names a GGUF file there: owner/model:Q4_K_M, owner/model/FILE.gguf."""
    return NAME.fullmatch(name) is not None and ".." not in name


def repository_of(name: str) -> str:
    """The repository that a hub name is of."""
    found = NAME.fullmatch(name)
    assert found is not None, "is_hub_name was asked"
    return found["repo"]


def wanted_files(name: str, hub: Hub) -> list[str]:
    """Patterns of the files that a hub name asks for; for owner/model:Q4_K_M, of what makes rows of images, too."""
    found = NAME.fullmatch(name)
    assert found is not None, "is_hub_name was asked"
    kind, file = found["kind"], found["file"]
    if file:
        return [SHARD.sub(r"\1-*-of-\3.gguf", file)]
    if not kind:
        return FILES
    beside = [MMPROJ] if hub.mmproj is None else []
    return [*(f"*{case}{end}" for case in (kind.upper(), kind.lower()) for end in ENDS), *beside]


def download(name: str, hub: Hub) -> Path:
    """The folder, or the GGUF file, that a hub name stands for; downloaded unless it is here already."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{name!r} is not a folder here, and downloading needs huggingface_hub: pip install 'quire[hub]'"
        ) from None
    found = NAME.fullmatch(name)
    assert found is not None, "is_hub_name was asked"
    kind, file = found["kind"], found["file"]
    try:
        where = snapshot_download(
            found["repo"], revision=hub.revision, cache_dir=hub.folder, allow_patterns=wanted_files(name, hub)
        )
    except (OSError, ValueError) as error:
        reason = _reason(error, found["repo"])
        raise ModelError(f"{name!r} is not a folder here and could not be downloaded: {reason}") from None
    folder = Path(where)
    if kind or file:
        ends = rf"(.*[-._])?{kind}(-\d+-of-\d+)?\.gguf"
        return _gguf(name, folder, re.compile(ends, re.IGNORECASE) if kind else None, file or "")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name!r} has no config.json; if GGUF files are there, name one: {name}:Q4_K_M, or {name}/FILE.gguf"
        )
    return folder


def config_on_hub(name: str, hub: Hub) -> Path | None:
    """The config.json of owner/model, of which nothing else is downloaded; None where the hub does not give it, and
    for whatever is no repository with one."""
    found = NAME.fullmatch(name)
    if found is None or found["kind"] or found["file"] or not is_hub_name(name) or Path(name).expanduser().exists():
        return None
    try:
        from huggingface_hub import snapshot_download

        where = snapshot_download(name, revision=hub.revision, cache_dir=hub.folder, allow_patterns=["config.json"])
    except (ImportError, OSError, ValueError):
        return None
    path = Path(where) / "config.json"
    return path if path.is_file() else None


def _reason(error: Exception, repository: str) -> str:
    """Why the hub did not give a repository, and what to do."""
    kinds = {each.__name__ for each in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"it is gated. Accept its terms on https://huggingface.co/{repository}, then log in here: hf auth login, "
            "or set HF_TOKEN"
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the hub has no {repository}, or it is private. Check the spelling; for a private one log in: "
            "hf auth login, or set HF_TOKEN"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repository} has no such revision; leave out --revision, or name a branch, tag or commit of it"
    if "LocalEntryNotFoundError" in kinds:
        return (
            "the hub cannot be reached, and the model is not in its cache. Check the network, or set HF_ENDPOINT to a "
            "mirror"
        )
    return str(error)


def _gguf(name: str, folder: Path, pattern: re.Pattern[str] | None, file: str) -> Path:
    """The one file meant; the folder may hold others of earlier downloads."""
    if pattern is None:
        files = [folder / file] if (folder / file).is_file() else []
    else:
        found = sorted(path for path in folder.rglob("*.gguf") if pattern.fullmatch(path.name))
        files = [path for path in found if shard_number(path) in (None, 1) and "mmproj" not in path.name.lower()]
    if len(files) != 1:
        there = ", ".join(str(path.relative_to(folder)) for path in files) or "no file of the repository"
        raise ModelError(f"{name!r} means {there}; name one file as owner/model/FILE.gguf")
    return files[0]
