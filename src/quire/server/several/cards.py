"""Bodies of what is asked and told of models that come and go."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.server.api.replies import ModelCard


class NamedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/models/load and /v1/models/unload."""

    model: str


class StateCard(ModelCard, kw_only=True):
    """A model in /v1/models. `status`: loaded, loading, unloaded or failed; then `error` says why.

    `needed_bytes`: of weights and KV cache, as its headers say.
    """

    status: str
    pinned: bool
    needed_bytes: int
    error: str | None = None


class StateList(msgspec.Struct, kw_only=True):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[StateCard]
