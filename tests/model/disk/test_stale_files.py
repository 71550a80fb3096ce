"""Folders whose files say more than one thing: read as transformers reads them, with a note of what is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loaded_folders import load, whole
from oracle import edit_config, logits, relative_error, write
from paged_model import prompt
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import Checkpoint

TOKENS = prompt(9, 1)


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def same_as_transformers(folder: Path) -> list[str]:
    """The notes of a folder that both read alike."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ours = load(folder)
    assert relative_error(whole(ours, TOKENS), logits(theirs, TOKENS)) <= 1e-5
    return list(ours.notes)


def test_a_whole_file_beside_a_stale_index(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    index(tmp_path, dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model-00001-of-00002.safetensors"))
    [note] = same_as_transformers(tmp_path)
    assert "model.safetensors is read" in note and "model-00001-of-00002.safetensors" in note
    save_file({"junk": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    assert len(same_as_transformers(tmp_path)) == 1


def test_an_index_of_the_whole_file_is_not_stale(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    index(tmp_path, dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model.safetensors"))
    assert same_as_transformers(tmp_path) == []


def test_a_tensor_in_two_shards_is_that_of_the_index(tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", shard="40KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, file in places.items() if file == shards[1])
    for file in (shards[0], shards[2]):
        content = load_file(tmp_path / file)
        save_file(content | {name: torch.zeros(3)}, tmp_path / file)
    model = load(tmp_path)
    assert relative_error(whole(model, TOKENS), logits(oracle, TOKENS)) <= 1e-5
    assert [note.split(":")[0] for note in model.notes] == [shards[0], shards[2]]
    assert all(name in note and "index" in note for note in model.notes)
    del places[name]
    index(tmp_path, places)
    with pytest.raises(ModelError, match=f"{name} is also in"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_beyond_the_config_are_ignored(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4})
    edit_config(tmp_path, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 2})
    [note] = same_as_transformers(tmp_path)
    assert "2 layers" in note and "layers 2, 3" in note
    net = Net.open(str(tmp_path))
    write_folder(tmp_path / "out", net.tensors, net.config, net.folder, torch.float32)
    assert same_as_transformers(tmp_path / "out") == []
    left = Checkpoint(tmp_path / "out").infos
    assert not any(".2." in name or ".3." in name for name in left)


def test_only_layers_may_be_left_over(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    content = load_file(tmp_path / "model.safetensors")
    save_file(content | {"model.layers.1.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no role of .* takes: model\.layers\.1\.extra\.weight"):
        load(tmp_path)
