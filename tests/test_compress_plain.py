"""Quantized checkpoints and GGUF files opened as plain tensors, and written as folders that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type  # noqa: E402

from foreign_weights import awq, compressed_config, dequantize, gptq, packed, quantize, replace_linears  # noqa: E402
from gguf_models import write_gguf  # noqa: E402
from quire.compress.net import Net  # noqa: E402
from test_compress_write import read_back, write_net  # noqa: E402
from test_gguf import FAMILIES, WIDE  # noqa: E402
from test_model import TOLERANCE  # noqa: E402
from test_net import error, oracle_logits, random_tokens  # noqa: E402


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_files_become_folders(name: str, tmp_path: Path) -> None:
    family, facts = FAMILIES[name]
    oracle, tokens = write_gguf(tmp_path / "model.gguf", family, **facts), random_tokens(2, 9)
    with torch.no_grad():
        net, want = Net.open(str(tmp_path / "model.gguf")), oracle_logits(oracle, tokens)
        assert error(net.logits(tokens), want) <= TOLERANCE
        write_net(tmp_path / "out", net)
        assert error(oracle_logits(read_back(tmp_path / "out", family), tokens), want) <= TOLERANCE
        assert error(Net.open(str(tmp_path / "out")).logits(tokens), want) <= TOLERANCE
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0])
def test_quantized_gguf_files_become_plain(kind: Type, tmp_path: Path) -> None:
    oracle = write_gguf(tmp_path / "model.gguf", "llama", lambda name: kind, **WIDE)
    net, tokens = Net.open(str(tmp_path / "model.gguf")), random_tokens(2, 9)
    leaves = net.require_grad(["model.layers.1.mlp.down_proj.weight"])
    logits = net.logits(tokens)
    assert error(logits, oracle_logits(oracle, tokens)) <= TOLERANCE
    logits.square().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
