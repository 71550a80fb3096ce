"""The shape of EAGLE's layer, from its config.json alone."""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.families.table import read_spec
from quire.model.spec import ModelSpec


def layer_spec(config: HfConfig, target: ModelSpec, name: str) -> ModelSpec:
    """One layer of the target's widths; `ModelError` where they are not those of the target, `name`."""
    raw = {"model_type": "llama", "vocab_size": target.vocab_size, **config.raw, "num_hidden_layers": 1}
    raw.pop("layer_types", None)
    spec, _, config = read_spec(raw, config.where)
    for field, said, own in (
        ("hidden_size", spec.hidden, target.hidden), ("vocab_size", spec.vocab_size, target.vocab_size),
    ):  # fmt: skip
        if said != own:
            raise config.fail(field, f"is {said}, that of {name} is {own}")
    return spec
