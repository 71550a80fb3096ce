"""A checkpoint that parts are taken out of: its tensors as they lie on disk, checked against its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError, ModelError
from quire.model.disk.checkpoint import TensorInfo
from quire.model.disk.claim import Claim, claim
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewritten
from quire.model.disk.stacked import StackedSource
from quire.model.families.find import read_spec
from quire.model.families.row import Family
from quire.model.load.roles import disk_rows
from quire.model.spec import ModelSpec
from quire.ops.arrays import dtype_of
from quire.ops.lazy import torch
from quire.quant.registry import DENSE

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "config.json"


class _InMemorySource:
    """Tensors in memory as a `Source`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.infos = {
            name: TensorInfo(dtype_of(tensor), tuple(tensor.shape), "the checkpoint")
            for name, tensor in tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_ahead(self, names: Iterable[str]) -> None:
        return

    def give_back(self) -> None:
        return


@dataclass(frozen=True)
class PrunableCheckpoint:
    """A checkpoint whose tensors were all claimed. `config`: with the family's defaults, in our spelling.

    `origins`: name that was claimed -> the tensor's own.
    """

    tensors: Mapping[str, Tensor]
    raw: Mapping[str, Any]
    spec: ModelSpec
    family: Family
    config: HfConfig
    claim: Claim
    origins: Mapping[str, str]

    @staticmethod
    def of(tensors: Mapping[str, Tensor], raw: Mapping[str, Any]) -> PrunableCheckpoint:
        """Claim `tensors` by their names on disk, with `raw`, the content of config.json.

        `ModelError` when they do not belong together, or the model cannot be made smaller as it lies.
        """
        spec, family, config = read_spec(raw, WHERE)
        if config.has("quantization_config"):
            raise config.fail(
                "quantization_config", "a quantized checkpoint cannot lose parts; prune before quantizing"
            )
        if spec.encoder_decoder:
            raise config.fail("model_type", f"{spec.family!r}: parts of an encoder-decoder cannot be dropped")
        seen = Rewritten(_InMemorySource(tensors), family.rewrites)
        family = family.named_as(seen.infos)
        infos = StackedSource(seen, family, spec.layers).infos if family.stacks else seen.infos
        claimed = claim(infos, spec, family, family.required_parts(config), DENSE)
        return PrunableCheckpoint(tensors, raw, spec, family, config, claimed, seen.origins)

    def rows(self, role: str, layer: int) -> tuple[str, Tensor]:
        """Find the matrix on disk that holds `role`, and which of its rows are the role's, in order: int64 [n]."""
        holder = self.claim.holder(role, layer)
        rows = disk_rows(role, holder, self.spec, self.family.grouped_qkv, 0)
        if rows is None:
            return holder, torch.arange(self.tensors[self.name(holder, layer)].shape[self.axis(0)])
        return holder, torch.from_numpy(rows)

    def name(self, role: str, layer: int | None, part: str = "weight") -> str:
        """Return the name on disk of the tensor of a role (of a layer, None: of none), "" when there is none."""
        claimed = self.claim.get(role, layer).get(part, "")
        return self.origins.get(claimed, claimed)

    def axis(self, axis: int) -> int:
        """Return where axis 0 (outputs) or 1 (inputs) of a layer's matrices lies on disk."""
        return 1 - axis if self.family.transposed else axis

    def with_fields(self, **changed: Any) -> dict[str, Any]:
        """Change fields of config.json, given in our spelling, under each spelling that it has, else the family's."""
        new = dict(self.raw)
        for ours, value in changed.items():
            spellings = [own for name, own in self.family.spelling if name == ours]
            present = [name for name in (ours, *spellings) if name in self.raw]
            for name in present or spellings[:1] or [ours]:
                new[name] = value
        return new

    def verified(
        self, tensors: dict[str, Tensor], raw: dict[str, Any], want: ModelSpec
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return both as they came, once they were found to be a checkpoint of `want`; else `ModelError` with the
        reason."""
        try:
            got = read_spec(raw, WHERE)[0]
        except ModelError as error:
            raise self.refuse(f"no config.json of the family says what is left ({error.message})") from None
        other = [f.name for f in fields(ModelSpec) if getattr(got, f.name) != getattr(want, f.name)]
        if other:
            raise self.refuse(f"no config.json of the family says what is left: {', '.join(other)} would change")
        try:
            PrunableCheckpoint.of(tensors, raw)
        except ModelError as error:
            raise self.refuse(f"what is left is no checkpoint of the family ({error.message})") from None
        return tensors, raw

    def refuse(self, reason: str) -> ModelError:
        """Return an error that names the family, for the caller to raise."""
        return refusal(self.spec, reason)


def refusal(spec: ModelSpec, reason: str) -> ModelError:
    """Return an error about a family whose models cannot be made smaller so, for the caller to raise."""
    return ModelError(f"{spec.family!r}: {reason}; prune weights instead, which keeps every shape")


def check_kept(keep: Iterable[int], count: int, what: str) -> list[int]:
    """Return `keep` as a list; `ConfigError` unless it is ascending numbers below `count`, at least one."""
    kept = list(keep)
    if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= count:
        raise ConfigError(f"{what} to keep: {kept!r:.80} needs ascending numbers from 0 to {count - 1}, at least one")
    return kept
