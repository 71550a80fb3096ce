"""Which sizes of a family config.json can give is what transformers' models of it are built with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oracle import family_facts
from paged_model import VARIANTS as DENSE
from pruned_checkpoints import ATTENTION_OUT, HYBRIDS, MLP_OUT, UNLIKE, WITHOUT_MLP, layers_of, part
from pruned_checkpoints import PRUNED as VARIANTS
from quire.compress.prune.structured import AUTO_WIDTH, DERIVED, EVEN_HEADS
from quire.model.disk.hf_config import HfConfig
from quire.model.families.find import find_family

FIRST = {family: facts for family, facts in reversed(VARIANTS.values()) if family not in (*HYBRIDS, *UNLIKE)}
DENSE_FIRST = {family: facts for family, facts in reversed(DENSE.values()) if family not in WITHOUT_MLP}


def inputs(model: PreTrainedModel, names: tuple[str, ...]) -> int:
    """Inputs of one of the matrices `names` of the first layer."""
    matrix = part(layers_of(model)[0], names)
    weight = matrix.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0 if type(matrix).__name__ == "Conv1D" else 1]


def takes(family: str, names: tuple[str, ...], wanted: int, **facts: object) -> bool:
    """Whether a model of these facts can be made, and then has `wanted` inputs of its matrices `names`."""
    try:
        config = AutoConfig.for_model(family, **family_facts(family, facts))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except AttributeError:
        return False
    return inputs(model, names) == wanted


def any_head(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without a rope for heads of one size; ropes by kind of layer, which a family must have, stay."""
    rope = facts.get("rope_parameters", {})
    if any(isinstance(part, dict) for part in rope.values()):
        return facts
    return {name: value for name, value in facts.items() if name != "rope_parameters"}


@pytest.mark.parametrize("family", FIRST)
def test_head_dim(family: str) -> None:
    facts = any_head(FIRST[family])
    assert takes(family, ATTENTION_OUT, 4 * 32, **(facts | {"head_dim": 32})) == (family not in DERIVED["head_dim"])


@pytest.mark.parametrize("family", DENSE_FIRST)
def test_intermediate_size(family: str) -> None:
    said = {"model_type": family, "hidden_size": 64, "num_attention_heads": 4} | DENSE_FIRST[family]
    spelling = find_family(HfConfig(said, "config.json"))[1].spelling
    field = next((own for ours, own in spelling if ours == "intermediate_size"), "intermediate_size")
    as_said = {AUTO_WIDTH: False} if family == "lfm2" else {}
    facts = DENSE_FIRST[family] | {field: 40} | as_said
    assert takes(family, MLP_OUT, 40, **facts) == (family not in DERIVED["intermediate_size"])


@pytest.mark.parametrize("family", [family for family in FIRST if family not in DERIVED["head_dim"]])
def test_heads_that_do_not_divide_the_hidden_size(family: str) -> None:
    facts = any_head(FIRST[family])
    own = {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}
    try:
        fits = takes(family, ATTENTION_OUT, 3 * 32, **(facts | own))
    except StrictDataclassClassValidationError as error:
        assert "not a multiple of the number of attention heads" in str(error)
        fits = False
    assert fits == (family not in EVEN_HEADS)
