"""Quantized checkpoints and GGUF files opened as plain tensors, and written as folders that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from foreign_weights import awq, compressed_config, dequantize, gptq, packed, quantize, replace_linears
from gguf_families import FAMILIES, WIDE
from gguf_models import TEMPLATE, add_vocabulary, write_gguf
from gguf_written import write_folder
from hidden_rows import hide_rows
from model_variants import BORROWED
from net_checks import ALL, error, oracle_logits, random_tokens, read_back, write_net
from op_runs import generator
from oracle import edit_config, write
from paged_model import TOLERANCE
from quire.compress.checkpoint.dequantized import FusedSource
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import copy_tokenizer_files
from quire.compress.layouts.gguf import write_gguf as write_as_gguf
from quire.core.errors import ModelError
from quire.model.describe import open_model
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.renamed_tensors import Rewritten
from quire.text.template import read_templates


@pytest.mark.sampled(5)
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
    assert read_templates(tmp_path / "out")[0] == {"default": TEMPLATE}


def write_templates(path: Path, *names: str) -> None:
    """A file of a vocabulary and chat templates of these names, beside the default one."""
    writer = GGUFWriter(path, "llama")
    add_vocabulary(writer, 99)
    for name in names:
        writer.add_string(f"tokenizer.chat_template.{name}", f"{name} {{{{ messages }}}}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_named_chat_templates_of_gguf_files_become_files(tmp_path: Path) -> None:
    write_templates(tmp_path / "model.gguf", "rag", "tool_use")
    (tmp_path / "out").mkdir()
    copy_tokenizer_files(tmp_path / "model.gguf", tmp_path / "out")
    held = {"default": TEMPLATE} | {name: f"{name} {{{{ messages }}}}" for name in ("rag", "tool_use")}
    assert read_templates(tmp_path / "out")[0] == held


def test_a_chat_template_of_a_gguf_file_stays_in_its_folder(tmp_path: Path) -> None:
    write_templates(tmp_path / "model.gguf", "../../elsewhere")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="elsewhere"):
        copy_tokenizer_files(tmp_path / "model.gguf", tmp_path / "out")
    assert not list(tmp_path.rglob("elsewhere*"))


def test_a_file_of_stacks_that_run_in_turns_becomes_a_folder(tmp_path: Path) -> None:
    oracle, tokens = write_folder(tmp_path, "hrm_text"), random_tokens(2, 9)
    write_as_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    net = Net.open(str(tmp_path / "model.gguf"))
    write_net(tmp_path / "out", net)
    own, made = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "out"))
    assert own.keys() == made.keys()
    with torch.no_grad():
        want = oracle_logits(oracle, tokens)
        assert error(net.logits(tokens), want) <= TOLERANCE
        assert error(oracle_logits(read_back(tmp_path / "out", "hrm_text"), tokens), want) <= TOLERANCE


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0])
def test_quantized_gguf_files_become_plain(kind: Type, tmp_path: Path) -> None:
    oracle = write_gguf(tmp_path / "model.gguf", "llama", lambda name: kind, **WIDE)
    net, tokens = Net.open(str(tmp_path / "model.gguf")), random_tokens(2, 9)
    leaves = net.require_grad(["model.layers.1.mlp.down_proj.weight"])
    logits = net.logits(tokens)
    assert error(logits, oracle_logits(oracle, tokens)) <= TOLERANCE
    logits.square().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())


FORMS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq(4, 32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "compressed": (
        compressed_config("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        packed(4, False),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("form", FORMS)
def test_quantized_checkpoints_become_folders(form: str, family: str, tmp_path: Path) -> None:
    config, pack = FORMS[form]

    def convert(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = quantize(w, 4, 32, False, torch.float16)
        return pack(codes, zeros, scales), dequantize(codes, zeros, scales)

    oracle, tokens = replace_linears(tmp_path / "in", config, convert, family=family), random_tokens(2, 9)
    with torch.no_grad():
        net, want = Net.open(str(tmp_path / "in")), oracle_logits(oracle, tokens)
        assert error(net.logits(tokens), want) <= TOLERANCE
        write_net(tmp_path / "out", net)
        assert error(oracle_logits(read_back(tmp_path / "out", family), tokens), want) <= TOLERANCE
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_what_cannot_be_made_plain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, facts = BORROWED["xielu"]
    hide_rows(monkeypatch, family)
    write(tmp_path / "borrowed", family, **facts)
    with pytest.raises(ModelError, match="'apertus' runs by the code of transformers"):
        Net.open(str(tmp_path / "borrowed"))
    write(tmp_path / "pieces", "stablelm", qk_layernorm=True, use_parallel_residual=True)
    file = tmp_path / "pieces" / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("o_proj.weight")]:
        parts = gptq(4, 32)(*quantize(tensors.pop(name), 4, 32, False, torch.float16))
        tensors |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(tmp_path / "pieces", quantization_config=FORMS["gptq"][0])
    with pytest.raises(ModelError, match="k_head_norms lies in pieces"):
        Net.open(str(tmp_path / "pieces"))


def test_experts_in_mxfp4_become_the_stacked_ones_of_the_release(tmp_path: Path) -> None:
    oracle, tokens, g = write(tmp_path / "in", "gpt_oss", **ALL["gpt_oss"][1]), random_tokens(2, 9), generator()
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, n, k // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, n, k // 32), generator=g, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        oracle.get_parameter(name).data.copy_(values)
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(tmp_path / "in", quantization_config={"quant_method": "mxfp4"})
    with torch.no_grad():
        net, want = Net.open(str(tmp_path / "in")), oracle_logits(oracle, tokens)
        assert error(net.logits(tokens), want) <= TOLERANCE
        write_net(tmp_path / "out", net)
        assert error(oracle_logits(read_back(tmp_path / "out", "gpt_oss"), tokens), want) <= TOLERANCE


@pytest.mark.parametrize("variant", ["gpt_oss", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "mixtral", "olmoe", "llama"])
def test_tensors_are_named_and_laid_out_as_releases_are(variant: str, tmp_path: Path) -> None:
    """Those of transformers' file, seen one for each matrix, and put together again."""
    family, facts = ALL[variant]
    write(tmp_path, family, **facts)
    rewrites = open_model(str(tmp_path)).family.rewrites
    made = FusedSource(Rewritten(Checkpoint(tmp_path), rewrites), rewrites)
    want = load_file(tmp_path / "model.safetensors")
    assert set(made.infos) == set(want)
    for name, tensor in want.items():
        assert made.infos[name].shape == tuple(tensor.shape) and torch.equal(made.tensor(name), tensor), name
