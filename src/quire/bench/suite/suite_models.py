"""What a suite's models are: shapes with random weights, folders, GGUF files, the embedded one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.core.config import EngineConfig
from quire.core.dtypes import Dtype
from quire.core.errors import QuireError
from quire.engine.engine_options import engine_config
from quire.figures.schema import RowModel
from quire.model.describe import ModelFacts, compute_dtype, describe
from quire.model.mixers.layer_mixers import format_of, layouts_of
from quire.ops.choice import backend_of

EMBEDDED = ("", "pydoc")


@dataclass(frozen=True)
class SuiteModel:
    """A model by the name that the suite gives it. `path` is what engines are told; `why`: no engine can have it.

    `random`: its weights are made up.
    """

    name: str
    path: str
    random: bool
    facts: ModelFacts | None = None
    why: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """How quire is told of it."""
        return {"model": self.path} | ({"load_format": "dummy"} if self.random else {})

    @property
    def vocab_size(self) -> int:
        """Ids of random prompts lie below."""
        return self.facts.spec.vocab_size if self.facts is not None else 0

    def row(self, options: dict[str, Any], made: str = "") -> RowModel:
        """What a row says of it with quire's `options`; `made`: the format of a peer's file."""
        if self.facts is None:
            return RowModel(name=self.name, format=made)
        try:
            config = engine_config(self.options | options)
        except QuireError:
            return RowModel(name=self.name, parameters=self.facts.parameters, format=made)  # the engine will say why
        kept, on_disk = _formats(config, self.facts)
        weights = options.get("quantization") or ("bf12" if options.get("bf16_bits") == 12 else on_disk)
        kinds = {"format": made or str(weights), "kv_format": "" if made else kept.name}
        return RowModel(name=self.name, parameters=self.facts.parameters, **kinds)


def _formats(config: EngineConfig, facts: ModelFacts) -> tuple[Dtype, str]:
    """Formats of keys and values, and of weights that are not quantized while loading."""
    dtype, _ = compute_dtype(config.model.dtype, facts.dtype)
    stored = dtype.name if facts.scheme in ("", "none", "dense") else facts.scheme
    layouts = layouts_of(facts.spec, config.cache.kv_cache_dtype, dtype, backend_of(config.device))
    return format_of(layouts), stored


def source_of(name: str, work: Path) -> SuiteModel:
    """A shape's config is written below `work`. What cannot be read is said by the source."""
    shape = name in SHAPES
    path = str(write_config(name, work / "shapes" / name)) if shape else "" if name in EMBEDDED else name
    shown = name if shape else "pydoc" if name in EMBEDDED else Path(name).name if Path(name).exists() else name
    try:
        return SuiteModel(shown, path, shape, describe(path, "dummy" if shape else "auto"))
    except QuireError as error:
        return SuiteModel(shown, path, shape, why=error.message)
