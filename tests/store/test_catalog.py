"""The catalog: what names mean, and that quire runs what it lists."""

from __future__ import annotations

import re

import pytest

from quire.core.errors import ModelError
from quire.store.catalog import catalog, known_names, look_up
from quire.store.hub import is_hub_name
from quire.store.names import stored_path, unknown_name
from quire.store.places import folder_of

SPDX = {"Apache-2.0", "MIT"}


def test_entries_are_whole_and_names_are_there_once() -> None:
    assert len(catalog()) >= 60
    names = [each for name, entry in catalog().items() for each in (name, *entry.also)]
    assert len(names) == len(set(names)) == len(known_names())
    for name, entry in catalog().items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*(:[a-z0-9.-]+)?", name), name
        assert (entry.python is None) == bool(entry.hub), name
        assert entry.python is not None or is_hub_name(entry.hub), name
        assert entry.license in SPDX or entry.license.startswith("LicenseRef-"), name
        assert entry.mb > 0 and entry.context > 0
        assert entry.sampling.keys() <= {"temperature", "top_p", "top_k", "min_p"}, name
    assert {entry.kind for entry in catalog().values()} == {"chat", "vectors", "base"}


@pytest.mark.parametrize(
    ("name", "stored", "hub"),
    [
        ("qwen3", "qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("Qwen3:0.6B", "qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("qwen3:latest", "qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("qwen3:4b-q8_0", "qwen3:4b-q8_0", "Qwen/Qwen3-4B-GGUF:Q8_0"),
        ("qwen3:4b-q4_K_M", "qwen3:4b", "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        ("mistral:q5_k_m", "mistral:q5_k_m", "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q5_K_M"),
        ("gpt2", "gpt2", "openai-community/gpt2"),
    ],
)
def test_a_name_means_a_model_and_a_quantization(name: str, stored: str, hub: str) -> None:
    pick = look_up(name)
    assert pick is not None and (pick.stored_name, pick.hub_name) == (stored, hub)


def test_what_is_no_name() -> None:
    assert [name for name in ("", "nowhere", "gpt2:q8_0", "smollm2:q8_0", "qwen3:q", "../qwen3") if look_up(name)] == []
    assert look_up("smollm2:135m") == look_up("smollm2")
    with pytest.raises(
        ModelError, match=r"qwen3:0\.6b is not on this machine yet\. Run: quire pull qwen3:0\.6b \(639 MB\)"
    ):
        stored_path("qwen3:0.6b")
    assert "Did you mean smollm2" in unknown_name("smolm2").message
    assert "Did you mean" not in unknown_name("/no/where").message


def test_folders_of_models_are_apart() -> None:
    names = ["a:b", "a", "o/a:b", "o/a", "o/a/b.gguf", *known_names()]
    assert len({folder_of(name) for name in names}) == len(names)
    assert {folder_of(name).parent for name in names} == {folder_of("x").parent}
