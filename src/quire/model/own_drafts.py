"""Drafts where nothing was asked: models whose files have a layer for it use that. Nothing here imports torch."""

from __future__ import annotations

from msgspec.structs import replace

from quire.core.config import EngineConfig, SpeculationConfig
from quire.core.errors import ConfigError
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.table import check_known, check_options
from quire.core.speculation import OWN_LAYER
from quire.model.describe import ModelFacts, describe
from quire.model.known import known_of, known_of_device
from quire.ops.choice import choose
from quire.store.hub import hub_of


def with_own_drafts(config: EngineConfig, found: ModelFacts | None = None, device: Known | None = None) -> EngineConfig:
    """`config` with the drafts that `own_drafts` finds."""
    return own_drafts(config, found, device)[0]


def own_drafts(
    config: EngineConfig, found: ModelFacts | None = None, device: Known | None = None
) -> tuple[EngineConfig, str]:
    """`config`, with drafts by the layer of the model's own files where it says nothing of drafts and has such a layer.

    What else was asked for goes before: where that excludes these drafts, there are none, and the second value says
    why ("" otherwise). How many tokens are drafted, and whether any are, is decided step by step
    (`speculate.draft_length`). `found`: what `describe` says of the model.
    """
    if config.speculation != SpeculationConfig():
        return config, ""
    found = describe(config.model.model, config.model.load_format, hub_of(config.model)) if found is None else found
    if found.mtp is None:
        return config, ""
    if device is None:
        choice = choose(config.device)
        device = known_of_device(config, choice.backend, choice.chosen)
    asked = replace(config, speculation=SpeculationConfig(speculative_config=OWN_LAYER))
    try:
        check_options(asked.features)
        check_known(asked.features, known_of(asked, found) | device)
    except ConfigError as error:
        return config, error.message
    return asked, ""
