"""Names of models as commands take them: which are known here, and how one gets here."""

from __future__ import annotations


def ensure(name: str) -> str:
    """The model `name` as the engine takes it, brought here first where that needs a download.

    Folders, files and names of the Hugging Face Hub stay as they are: the engine downloads what it is missing.
    """
    return name


def known_models() -> list[str]:
    """Names of models that are here and need no path, for completion."""
    return []
