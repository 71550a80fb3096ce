"""Folders that are written: read back by transformers with equal logits, of every family, and whole or not there."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from foreign_weights import compressed_config, gptq, packed, replace_linears
from gguf_models import write_gguf
from oracle import NOT_EAGER, edit_config, write
from quire.compress import write as writing
from quire.compress.net import Net
from quire.compress.roles import by_role, get_role, set_role
from quire.compress.write import write_folder
from quire.core.errors import ConfigError, ModelError
from test_net import ALL, ENCODED, error, oracle_logits, random_tokens
from test_model import TOLERANCE
from tiny_model import write_tiny


def read_back(folder: Path, family: str = "llama", code: Any = AutoModelForCausalLM) -> PreTrainedModel:
    found, report = code.from_pretrained(
        folder, attn_implementation=NOT_EAGER.get(family, "eager"), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    model: PreTrainedModel = found.eval()
    return model


def write_net(out: Path, net: Net, dtype: torch.dtype = torch.float32) -> None:
    write_folder(out, net.tensors, net.config, net.folder, dtype)


@pytest.mark.parametrize("variant", ALL)
def test_transformers_reads_what_was_written_by_role(variant: str, tmp_path: Path) -> None:
    """Each matrix is moved by a change that is made to its role, in our rows, and undone in transformers' module."""
    family, facts = ALL[variant]
    write(tmp_path / "in", family, **facts)
    net, tokens = Net.open(str(tmp_path / "in")), random_tokens(1, 9)
    g = torch.Generator().manual_seed(5)
    for role, layer, expert, matrix in by_role(net):
        assert torch.equal(get_role(net, role, layer, expert), matrix)
        new = matrix + 0.02 * torch.randn(matrix.shape, generator=g)
        set_role(net, role, layer, expert, new)
        assert torch.equal(get_role(net, role, layer, expert), new)
    with torch.no_grad():
        want = net.logits(tokens)
        write_net(tmp_path / "out", net)
        assert error(oracle_logits(read_back(tmp_path / "out", family), tokens), want) <= TOLERANCE
        assert error(Net.open(str(tmp_path / "in")).logits(tokens), want) > 1e-3
