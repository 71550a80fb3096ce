"""quire: an LLM inference engine, server and workbench with native kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.core.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.core.errors import QuireError as QuireError
    from quire.core.params import SamplingParams as SamplingParams
    from quire.core.structured import StructuredOutputsParams as StructuredOutputsParams
    from quire.engine.beam import BeamSearchOutput as BeamSearchOutput
    from quire.engine.beam import BeamSearchParams as BeamSearchParams
    from quire.engine.llm import LLM as LLM
    from quire.engine.outputs import CompletionOutput as CompletionOutput
    from quire.engine.outputs import RequestOutput as RequestOutput
    from quire.engine.requests import LoRARequest as LoRARequest
    from quire.features.pooling.edge_embedding import PooledOutput as PooledOutput
    from quire.features.pooling.edge_embedding import PoolingParams as PoolingParams

_HOMES = {
    "QuireError": "quire.core.errors",
    "SamplingParams": "quire.core.params",
    "StructuredOutputsParams": "quire.core.structured",
    "BeamSearchOutput": "quire.engine.beam",
    "BeamSearchParams": "quire.engine.beam",
    "LLM": "quire.engine.llm",
    "LoRARequest": "quire.engine.requests",
    "CompletionOutput": "quire.engine.outputs",
    "RequestOutput": "quire.engine.outputs",
    "PooledOutput": "quire.features.pooling.edge_embedding",
    "PoolingParams": "quire.features.pooling.edge_embedding",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes a second that `quire --help` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from quire.core.machine import uncollected

    with uncollected(forever=False):
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
