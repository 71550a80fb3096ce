"""Which row a checkpoint's config.json asks for, and the spec that the row reads from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.assistants import check_alone
from quire.model.families.elsewhere import alike
from quire.model.families.multimodal import HEADS, MULTIMODAL, NESTED, text_config
from quire.model.families.row import Family, facts_of
from quire.model.families.speech import SPEECH
from quire.model.families.table import FAMILIES
from quire.model.families.text_decoders import TEXT_DECODERS
from quire.model.families.text_parts import ADAPTED, ADAPTERS, FLAT, text_part
from quire.model.spec import ModelSpec, Sight

ENCODER_DECODERS = ("t5", "mt5", *SPEECH)
CONTINUE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Generation", "Model")
"""Endings of names of classes that may continue text."""


def has_row(model_type: object) -> bool:
    """Whether a decoder of that type is read, by itself or in a model that has more."""
    return model_type in FAMILIES or model_type in TEXT_DECODERS


def find_family(config: HfConfig) -> tuple[str, Family]:
    """The row for `model_type`; `ModelError` naming the known ones."""
    name = config.text("model_type")
    if config.flag("is_encoder_decoder", False) and name not in ENCODER_DECODERS:
        known = ", ".join(ENCODER_DECODERS)
        raise config.fail("model_type", f"{name!r} is an encoder and a decoder; of those only {known} runs here")
    if not has_row(name):
        code = " (the code that auto_map points to is never run)" if config.has("auto_map") else ""
        raise config.fail(
            "model_type",
            f"{name!r} is not supported{code}{_task(config)}; {alike(name, (*FAMILIES, *MULTIMODAL))}; other causal "
            "models run, slowly, by the code of an installed transformers that has them (pip install "
            "'quire[transformers]')",
        )
    row = FAMILIES.get(name) or TEXT_DECODERS[name]
    return name, row(config) if callable(row) else row


def _task(config: HfConfig) -> str:
    """A word of a model whose class, by its name, does not continue text."""
    given = config.raw.get("architectures")
    classes = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    if not classes or any(name.endswith(CONTINUE) for name in classes):
        return ""
    return f" ({classes[0]} does not continue text)"


def read_spec(raw: Mapping[str, Any], where: str) -> tuple[ModelSpec, Family, HfConfig]:
    """Spec, family and reader (family defaults filled in) of a config.json's content; `where` names it in errors."""
    check_alone(raw, where)
    part = text_part(raw)
    if part is not None:
        text, sight, where = part.config, Sight(), f"{where}: {part.where}" if part.where else where
    else:
        text, sight = text_config(raw, where)
    name, family = find_family(HfConfig(text, where))
    if part is not None and part.kind in FLAT:
        family = replace(family, rewrites=(ADAPTED, *family.rewrites), buffers=(*family.buffers, *ADAPTERS))
    elif part is None and raw.get("model_type") in MULTIMODAL:
        heads = (*family.aliases.get("head", ()), *HEADS)
        family = replace(family, nested=NESTED, aliases={**family.aliases, "head": heads})
    config = family.fill_in(HfConfig(text, where))
    return ModelSpec(family=name, sight=sight, **facts_of(family, config)), family, config


def layer_spec(config: HfConfig, target: ModelSpec, name: str) -> ModelSpec:
    """Spec of EAGLE's layer, from its config.json; `ModelError` where its widths are not those of the target,
    `name`."""
    raw = {"model_type": "llama", "vocab_size": target.vocab_size, **config.raw, "num_hidden_layers": 1}
    raw.pop("layer_types", None)
    spec, _, config = read_spec(raw, config.where)
    for field, said, own in (
        ("hidden_size", spec.hidden, target.hidden), ("vocab_size", spec.vocab_size, target.vocab_size),
    ):  # fmt: skip
        if said != own:
            raise config.fail(field, f"is {said}, that of {name} is {own}")
    return spec
