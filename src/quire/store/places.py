"""Where pulled models lie, and how their names become names of folders."""

from __future__ import annotations

import os
from pathlib import Path

from quire.core.machine import cache_folder


def models_folder() -> Path:
    """The store's folder: $QUIRE_MODELS, or else `models` in quire's cache folder. It need not exist yet."""
    named = os.environ.get("QUIRE_MODELS", "")
    return Path(named).expanduser().absolute() if named else cache_folder() / "models"


def folder_of(name: str) -> Path:
    """The folder of the model `name`: no two names share one, and none leaves the store."""
    return models_folder() / name.replace("/", "--").replace(":", "@")
