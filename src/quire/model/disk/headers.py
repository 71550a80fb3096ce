"""A model folder whose headers were read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.core.dtypes import Dtype
from quire.core.pooling import NO_VECTORS, Pooling
from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.claim import Claim
from quire.model.disk.dummy import DummyWeights
from quire.model.disk.hf_config import HfConfig
from quire.model.families.row import Family
from quire.model.spec import ModelSpec
from quire.model.vision.reading import Reading
from quire.quant.base import QuantScheme
from quire.quant.registry import rows_in_file


@dataclass(frozen=True)
class ModelHeaders:
    """A model folder read as far as its headers, and checked: all that `describe` and `load_model` share.

    `mtp`: the layer that drafts, where the files have one (`families.mtp`).
    """

    name: str
    folder: Path
    config: HfConfig
    spec: ModelSpec
    family: Family
    source: TensorSource
    scheme: QuantScheme
    claim: Claim
    dtype: Dtype
    notes: tuple[str, ...]
    pooling: Pooling = NO_VECTORS
    vision: VisionHeaders | None = None
    mtp: ModelHeaders | None = None

    @property
    def quantized(self) -> bool:
        """Whether its matrices are codes, which are not quantized again."""
        return set(self.scheme.parts) != {"weight"}

    def in_file(self, role: str) -> int:
        """Bytes of the table `role` where single rows of it can be read out of the file, 0 where they cannot."""
        parts = self.claim.get(role)
        if isinstance(self.source, DummyWeights) or not rows_in_file(self.scheme, parts):
            return 0
        return sum(self.source.infos[name].nbytes for name in parts.values())

    @property
    def stored(self) -> str:
        """The format in which others made it, as `quantization_config` names it, or "gguf"; empty for a plain one."""
        name: str = self.config.child("quantization_config").text("quant_method", "")
        return "gguf" if self.folder.is_file() else name


@dataclass(frozen=True)
class VisionHeaders:
    """What makes rows of images: a tower, and what brings its rows to the decoder's width, each with its claim.

    `nbytes`: of a file of its own, whose matrices are seen otherwise than they lie there; 0: they lie as they are seen.
    """

    tower: ModelHeaders
    projector: ModelHeaders
    reading: Reading
    nbytes: int = 0

    @property
    def file(self) -> Path | None:
        """The file of its own, beside that of the decoder."""
        return self.tower.folder if self.nbytes else None
