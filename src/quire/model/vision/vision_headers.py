"""The vision part of a model folder, from its headers: whose tensors are whose, and a claim of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.images.processor_config import SettingFields, image_settings
from quire.model.disk.checkpoint import TensorSource, float_dtype
from quire.model.disk.claim import claim
from quire.model.disk.dummy import DummyWeights
from quire.model.disk.headers import ModelHeaders, VisionHeaders
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.source_subset import SourceSubset
from quire.model.families.multimodal import MULTIMODAL, vision_config
from quire.model.families.names import without
from quire.model.families.row import Family
from quire.model.families.text_parts import text_part
from quire.model.load.roles import DISK_ROLES
from quire.model.spec import ModelSpec
from quire.model.vision.projectors import Projector, ProjectorContext, read_projector
from quire.model.vision.reading import Reading, read_pixels
from quire.model.vision.tensors import VisionMatrices
from quire.model.vision.tower_row import Tower
from quire.model.vision.towers import find_tower
from quire.quant.registry import DENSE

OUTER = "model."
"""What names of all parts begin with in the files of newer writers."""


def part(source: TensorSource, raw: Mapping[str, Any]) -> tuple[TensorSource, TensorSource | None]:
    """The tensors of the decoder, and those that make rows of images; None if the model takes no images."""
    row = MULTIMODAL.get(str(raw.get("model_type")))
    if row is None or text_part(raw) is not None:
        return source, None
    others = tuple(name for names in row.others.values() for name in names)
    vision = {name for name in source.infos if name.removeprefix(OUTER).startswith(row.vision)}
    left = {name for name in source.infos if others and name.removeprefix(OUTER).startswith(others)}
    return SourceSubset(source, source.infos.keys() - vision - left), SourceSubset(source, vision)


def open_vision(
    folder: Path, raw: Mapping[str, Any], text: ModelSpec, vision: TensorSource | None, seed: int
) -> VisionHeaders | None:
    """Claim all tensors of `vision`, or make some up where it is None; None if the model takes no images.

    `text`: the decoder's shape. `ModelError` naming a tensor that is missing, left over or of another shape.
    """
    table = MULTIMODAL.get(str(raw.get("model_type")))
    if table is None or text_part(raw) is not None:
        return None
    said = VisionSaid.read(raw, str(folder / "config.json"), table.tower, text, image_settings(folder))
    row, projector = said.tower, said.projector
    names = set(vision.infos) if vision is not None else set()
    root = OUTER if vision is None or any(name.startswith(OUTER) for name in names) else ""
    own = {name for name in names if name.removeprefix(OUTER).startswith(table.vision[1:])}
    beginning = _beginning(row.family.names["patch"], names - own, root + table.vision[0])
    tower = VisionPart(said.inner, said.spec, said.trimmed(row.family), row.required(said.inner), beginning)
    made = VisionPart(said.config, projector.spec, projector.family, frozenset(projector.required), root)
    turned = [root + projector.names[role] for role in projector.turned]
    grouped = {root + projector.names[role]: projector.spec.connector.width for role in projector.grouped}
    unfolded = {beginning + row.family.names["patch"]: 3} if row.unfolded else {}
    return VisionHeaders(
        tower.open(folder, None if vision is None else VisionMatrices(vision, names - own, (), unfolded), seed),
        made.open(folder, None if vision is None else VisionMatrices(vision, own, turned, grouped), seed),
        said.reading,
    )


@dataclass(frozen=True)
class VisionSaid:
    """What files say of a vision part: `config` of all, `inner` of the tower, and the rows that read them.

    `whole`: the tower's shape with all of its layers, `spec`: as far as its rows are read.
    """

    config: HfConfig
    inner: HfConfig
    tower: Tower
    whole: ModelSpec
    spec: ModelSpec
    projector: Projector
    reading: Reading

    @classmethod
    def read(
        cls, raw: Mapping[str, Any], where: str, usual: str, text: ModelSpec, image: SettingFields | None
    ) -> VisionSaid:
        """Read `raw`, the config.json that errors name as `where`.

        `usual`: the type of a tower that names none; `text`: the decoder's shape; `image`: how images are cut.
        """
        config = HfConfig(raw, where)
        kind, row = find_tower(vision_config(raw, where), usual)
        inner = row.family.fill_in(vision_config(raw, where))
        whole = row.spec(kind, inner)
        projector = read_projector(ProjectorContext(config, inner, whole, text))
        pixels = read_pixels(image, projector.reading.pixels)
        reading = replace(projector.reading, pixels=pixels.centered if projector.reading.centered else pixels)
        return cls(config, inner, row, whole, _shortened(whole, reading, projector.merge), projector, reading)

    def trimmed(self, family: Family) -> Family:
        """`family` without what is not run: the layers behind the last that is read, and the norm behind them."""
        layer = family.names["layer"]
        skipped = (*family.skipped, *(layer.format(i) for i in range(self.spec.layers, self.whole.layers)))
        if self.reading.normed or "final_norm" not in family.names:
            return replace(family, skipped=skipped)
        skipped = (*skipped, f"{family.names['final_norm']}.")
        return replace(family, names=without(family.names, "final_norm"), skipped=skipped)


@dataclass(frozen=True)
class VisionPart:
    """A tower or a projector, whose names stand behind `beginning`."""

    config: HfConfig
    spec: ModelSpec
    family: Family
    required: frozenset[str]
    beginning: str

    def open(self, folder: Path, source: TensorSource | None, seed: int) -> ModelHeaders:
        """The claim of all that `source` has; numbers are made up where there is none."""
        outer = {role for role in self.family.names if role == "layer" or not DISK_ROLES[role].layer}
        names = {role: (self.beginning if role in outer else "") + name for role, name in self.family.names.items()}
        skipped = tuple(self.beginning + name for name in self.family.skipped)
        family = replace(self.family, names=names, skipped=skipped)
        source = DummyWeights(self.spec, family, self.required, seed) if source is None else source
        try:
            claimed = claim(source.infos, self.spec, family, self.required, DENSE)
        except ModelError as error:
            raise ModelError(f"{folder}: {error.message}") from None
        dtype = float_dtype(source.infos)
        return ModelHeaders(folder.name, folder, self.config, self.spec, family, source, DENSE, claimed, dtype, ())


def _shortened(spec: ModelSpec, reading: Reading, merge: int) -> ModelSpec:
    """The tower as far as its rows are read, which come in squares of `merge` patches a side."""
    layers = min(max((1, *reading.taps, *reading.deep)), spec.layers)
    patches = replace(spec.patches, merge=merge)
    return replace(spec, layers=layers, rope=spec.rope[:layers], windows=spec.windows[:layers], patches=patches)


def _beginning(patch: str, names: Collection[str], usual: str) -> str:
    """What stands before the tower's own names, by that of the matrix of its patches."""
    found = [name for name in names if name.endswith(f"{patch}.weight")]
    return min(found, key=len).removesuffix(f"{patch}.weight") if found else usual
