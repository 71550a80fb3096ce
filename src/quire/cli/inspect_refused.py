"""What `quire inspect` says of a model that does not load: what it is, why not, which row is nearest, what to do."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from quire.cli.show import show
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.checkpoint import resolve
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.families.find import find_family
from quire.model.families.multimodal import text_config
from quire.model.outline import KINDS, Outline, outline, outline_of_config
from quire.model.transformers_backend.detect import known_to_transformers
from quire.store.hub import Hub, config_on_hub, hub_of

REMEDIES = frozenset(remedy for _, remedy in KINDS.values())
"""What to do with files that are no models."""


def check_type_on_hub(model: str, hub: Hub) -> None:
    """Refuse a model of the hub by its config.json alone, before its weights are downloaded, where no row reads it."""
    path = config_on_hub(model, hub)
    if path is not None:
        raw = read_json(path)
        if not known_to_transformers(str(raw.get("model_type"))):
            find_family(HfConfig(text_config(raw, str(path))[0], str(path)))


def show_refused(config: EngineConfig, error: ModelError, as_json: bool) -> None:
    """Print what the files say of the model that `error` refuses; nothing where there are none that can be read, or
    where a row reads such models and this one is damaged."""
    found = _outline(config)
    if found is None or (not found.nearest and found.remedy not in REMEDIES):
        return
    told = [("runs here", "no"), ("because", error.message)]
    told += [("nearest", found.nearest)] if found.nearest else []
    told += [("what to do", found.remedy)]
    if as_json:
        print(json.dumps({"model": dict(found.rows), "does it run": dict(told)}, indent=2, ensure_ascii=False))
        return
    show("model", found.rows)
    show("does it run", told)


def _outline(config: EngineConfig) -> Outline | None:
    model, hub = config.model.model, hub_of(config.model)
    with suppress(ModelError, ConfigError):
        path = config_on_hub(model, hub)
        if path is not None:
            return outline_of_config(read_json(path), model)
        return outline(resolve(model, hub) if not Path(model).is_file() else Path(model))
    return None
