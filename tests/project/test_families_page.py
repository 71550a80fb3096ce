"""The page of families: each row was checked somewhere, each other model has a reason, and its lists are not old."""

from __future__ import annotations

import importlib.metadata

import pytest

from families_page import _checked, _types
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.families.elsewhere import (
    LACKS,
    architectures,
    causal_types,
    runs_slowly,
    version_of,
    why_no_gguf,
    why_no_row,
)
from quire.model.families.multimodal import MULTIMODAL
from quire.model.families.table import FAMILIES
from quire.model.families.text_decoders import TEXT_DECODERS


@pytest.mark.parametrize("name", sorted({*FAMILIES, *MULTIMODAL}))
def test_every_row_is_checked_somewhere(name: str) -> None:
    assert _checked(name)


def test_everything_else_has_a_reason() -> None:
    here, slow, none = _types()
    assert not {*here} & {*slow, *none} and {*here, *slow, *none} >= {*causal_types()}
    assert all(why_no_row(name) for name in (*slow, *none))
    assert all(why_no_gguf(name) for name in architectures() if name not in ARCHITECTURES)
    assert not {*LACKS} & {*FAMILIES, *MULTIMODAL, *TEXT_DECODERS, *ARCHITECTURES}
    assert "one softmax from another" in why_no_row("diffllama") and runs_slowly("diffllama")
    assert "routers that read what attention reads" in why_no_gguf("smallthinker")
    assert why_no_row("no_such_type") == why_no_gguf("no-such-architecture") == ""


def test_lists_are_those_of_the_programs() -> None:
    assert len(causal_types()) > 150 and len(architectures()) > 120
    assert "qwen2" in architectures()["qwen2"].types and architectures()["bert"].encoder
    assert causal_types()["rwkv"].why and not causal_types()["apertus"].why
    transformers = pytest.importorskip("transformers.models.auto.modeling_auto")
    if importlib.metadata.version("transformers") == version_of("transformers"):
        assert {*causal_types()} == {*transformers.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
