"""Folders that are written: read back by transformers with equal logits, of every family, and whole or not there."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from net_checks import ALL, ENCODED, error, oracle_logits, random_tokens, read_back, write_net
from often import one_of
from oracle import write
from paged_model import TOLERANCE
from quire.compress.checkpoint import writer
from quire.compress.checkpoint.linear_weights import get_role_matrix, matrices_by_role, set_role_matrix
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.core.errors import ConfigError, ModelError
from tiny_model import write_tiny


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", one_of(2, ALL))
def test_transformers_reads_what_was_written_by_role(variant: str, tmp_path: Path) -> None:
    """Each matrix is moved by a change that is made to its role, in our rows, and undone in transformers' module."""
    family, facts = ALL[variant]
    write(tmp_path / "in", family, **facts)
    net, tokens = Net.open(str(tmp_path / "in")), random_tokens(1, 9)
    g = torch.Generator().manual_seed(5)
    for role, layer, expert, matrix in matrices_by_role(net):
        assert torch.equal(get_role_matrix(net, role, layer, expert), matrix)
        new = matrix + 0.02 * torch.randn(matrix.shape, generator=g)
        set_role_matrix(net, role, layer, expert, new)
        assert torch.equal(get_role_matrix(net, role, layer, expert), new)
    with torch.no_grad():
        want = net.logits(tokens)
        write_net(tmp_path / "out", net)
        assert error(oracle_logits(read_back(tmp_path / "out", family), tokens), want) <= TOLERANCE
        assert error(Net.open(str(tmp_path / "in")).logits(tokens), want) > 1e-3


@pytest.mark.parametrize("variant", ENCODED)
def test_transformers_reads_encoder_decoders_written_by_role(variant: str, tmp_path: Path) -> None:
    family, facts = ENCODED[variant]
    write(tmp_path / "in", family, **facts)
    net, tokens, encoded = Net.open(str(tmp_path / "in")), random_tokens(1, 7), random_tokens(1, 9, seed=2)
    before = net.logits(tokens, encoded)
    for role, layer, expert, matrix in matrices_by_role(net):
        set_role_matrix(net, role, layer, expert, matrix * 1.1)
    want = net.logits(tokens, encoded)
    assert error(before, want) > 1e-3
    write_net(tmp_path / "out", net)
    back = read_back(tmp_path / "out", code=AutoModelForSeq2SeqLM)
    assert error(oracle_logits(back, tokens, encoded), want) <= TOLERANCE


def test_roles_that_are_not_there_and_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=True)
    net = Net.open(str(tmp_path))
    assert "head" not in {role for role, *_ in matrices_by_role(net)}
    with pytest.raises(ModelError, match="no head of its own"):
        set_role_matrix(net, "head", None, None, torch.zeros(99, 64))
    with pytest.raises(ModelError, match=r"q of layer 1 is \[64, 64\], not \[64, 63\]"):
        set_role_matrix(net, "q", 1, None, torch.zeros(64, 63))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_files_and_config(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "in", "llama")
    net = Net.open(str(tmp_path / "in"))
    write_net(tmp_path / "out", net, dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == set(net.tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype is dtype and torch.equal(tensor, net.tensors[name].to(dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == net.config | {"dtype": str(dtype).removeprefix("torch.")}


def test_large_models_lie_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, tokens = write(tmp_path / "in", "olmoe", num_experts=6, num_experts_per_tok=2), random_tokens(1, 9)
    monkeypatch.setattr(writer, "SHARD_BYTES", 100_000)
    net = Net.open(str(tmp_path / "in"))
    write_net(tmp_path / "out", net)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and all(len(load_file(f)) == 1 or f.stat().st_size < 110_000 for f in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in net.tensors.values())
    want = oracle_logits(oracle, tokens)
    assert error(oracle_logits(read_back(tmp_path / "out"), tokens), want) <= TOLERANCE
    assert error(Net.open(str(tmp_path / "out")).logits(tokens), want) <= TOLERANCE


def test_text_files_are_copied_and_code_is_not(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in")
    for name in ("generation_config.json", "chat_template.jinja", "modeling.py", "README.md"):
        (source / name).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    write_folder(tmp_path / "out", {"a": torch.ones(3), "i": torch.arange(2)}, {"x": 1}, source, torch.bfloat16)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "chat_template.jinja", "additional_chat_templates/tools.jinja",
    }  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["a"].dtype is torch.bfloat16 and torch.equal(tensors["i"], torch.arange(2))


class Breaking(dict[str, Tensor]):
    """Tensors of which the one named "c" is read once, for its shape, and interrupts the second time."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(**tensors)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        if name == "c" and "c" in self.asked:
            raise KeyboardInterrupt
        self.asked.append(name)
        return super().__getitem__(name)


def left(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in")
    tensors = Breaking(**{name: torch.ones(1000) for name in "abcd"})
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", tensors, {}, source, torch.float32)
    assert left(tmp_path) == {"in"}
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "half").write_text("what a killed process left")
    write_folder(tmp_path / "out", dict(tensors.items()), {}, source, torch.float32)
    assert left(tmp_path) == {"in", "out"} and "half" not in left(tmp_path / "out")


def test_a_full_disk_leaves_nothing_and_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "in")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"^.*/out cannot be written: the disk is full.*nothing of it was kept$"):
            write_folder(tmp_path / "out", {"a": torch.ones(9)}, {}, source, torch.float32)
    assert left(tmp_path) == {"in"}


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    source, limits = write_tiny(tmp_path / "in"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="out cannot be written: File too large"):
            write_folder(tmp_path / "out", {"a": torch.ones(100, 100)}, {}, source, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(tmp_path) == {"in"}


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in")
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", {"a": torch.ones(3)}, {}, source, torch.float32)
    with pytest.raises(ConfigError, match="out is there already"):
        write_folder(tmp_path / "out", {"a": torch.zeros(3)}, {}, source, torch.float32)
    assert bool(load_file(tmp_path / "out" / "model.safetensors")["a"].all())
