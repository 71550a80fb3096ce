"""Adapters in training: gradients by hand, PEFT's layout as it is served and merged, NF4 bases, checkpointing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_adapters import merged_by_hand, run_adapted
from oracle import BACKENDS, backend, logits, relative_error, write
from paged_model import TOLERANCE, prompt
from peft_layouts import Layout
from quire.compress.checkpoint.net import Net
from quire.compress.quantize import fp4
from quire.compress.quantize.fp4 import PackedNf4
from quire.compress.train.dataset import TrainingRow, collate
from quire.compress.train.job import write_merged
from quire.compress.train.lora_training import LoRA, adaptable_modules, merge_adapter, quantize_base, target_modules
from quire.compress.train.objective import CrossEntropy, NetLearner
from quire.compress.train.parametrized import ParametrizedNet, linear_modules
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.build import load_model
from quire.quant.codebook import NF4_NUMBERS
from quire.training.loop import LearningSchedule, TrainingRun
from training_runs import Plan, logits_of

FAMILIES = {"llama": ("*",), "gpt2": ("c_attn", "*.1.mlp.c_proj"), "phi3": ("qkv_proj", "down_proj")}
ROWS = [TrainingRow(prompt(24, seed)) for seed in range(4)]


def adapted(folder: Path, targets: tuple[str, ...], seed: int = 0) -> tuple[ParametrizedNet, LoRA]:
    """A net with an adapter whose matrices are both random."""
    net = ParametrizedNet.of(str(folder))
    lora = LoRA(net, target_modules(net, targets), 4, 6.0, seed)
    net.parametrized.parametrizations.append(lora.value)
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in lora.parameters.items():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=made) * 0.2)
    return net, lora


def gradients(net: ParametrizedNet, parameters: dict[str, Tensor], checkpointing: bool = False) -> dict[str, Tensor]:
    for p in parameters.values():
        p.grad = None
    loss: Any = CrossEntropy().loss(net, collate(list(enumerate(ROWS))), checkpointing)
    loss.backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_dense_matrix(family: str, tmp_path: Path) -> None:
    """With G the gradient of W + s B A, those of A and B are s B^T G and s G A^T."""
    write(tmp_path, family)
    net, lora = adapted(tmp_path, FAMILIES[family])
    found = gradients(net, lora.parameters)
    dense = ParametrizedNet.of(str(tmp_path))
    targets = target_modules(net, FAMILIES[family])
    with torch.no_grad():
        for m in targets:
            dense.set(m.name, net.parametrized.tensor(m.name).clone())
    wanted = gradients(dense, dense.require_grad([m.name for m in targets]))
    assert len(found) == 2 * len(wanted) == 2 * len(targets)
    for m in targets:
        g = wanted[m.name].t() if m.transposed else wanted[m.name]
        a, b = (f"{m.module}.lora_{which}.weight" for which in "AB")
        assert relative_error(found[a], 1.5 * lora.parameters[b].detach().t() @ g) < 1e-4
        assert relative_error(found[b], 1.5 * g @ lora.parameters[a].detach().t()) < 1e-4


def test_it_begins_as_the_model_and_learns_its_rows(tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama")
    net = ParametrizedNet.of(str(tmp_path / "m"))
    lora = LoRA(net, target_modules(net, ("*",)), 4, 8.0, 0)
    net.parametrized.parametrizations.append(lora.value)
    with torch.no_grad():
        assert relative_error(logits_of(net, ROWS[0].tokens), logits(oracle, ROWS[0].tokens)) < 1e-5
    learner = NetLearner(net, lora.parameters, CrossEntropy(), ROWS[:2], 2, 0)
    run = TrainingRun(learner, LearningSchedule(60, 0.02), Plan(60), tmp_path / "state.safetensors")
    run.go(lambda step, loss: None)
    assert run.losses[-1] < run.losses[0] / 4, "two rows are learned by heart"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_served_and_merged_alike(family: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", family)
    net, lora = adapted(tmp_path / "m", FAMILIES[family])
    folder, tokens = tmp_path / "a", prompt(19, 1)
    lora.write(folder, "m")
    want = logits(merged_by_hand(oracle, folder, 1.5), tokens)
    with torch.no_grad():
        assert relative_error(logits_of(net, tokens), want) < TOLERANCE
    config = flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=(f"one={folder}",))
    for name in BACKENDS:
        (got,) = run_adapted(load_model(config, backend(name)), [tokens], ["one"], [[19]])
        assert relative_error(got, want) < TOLERANCE
    write_merged(str(tmp_path / "m"), folder, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative_error(logits(again, tokens), want) < TOLERANCE


def test_the_layout_is_pefts(tmp_path: Path) -> None:
    write(tmp_path / "m", "llama")
    _, some = adapted(tmp_path / "m", ("q_proj", "*.layers.1.*.down_proj"))
    some.write(tmp_path / "some", "owner/model")
    config = json.loads((tmp_path / "some" / "adapter_config.json").read_text())
    whole = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)] + ["model.layers.1.mlp.down_proj"]
    assert config["target_modules"] == sorted(whole) and config["base_model_name_or_path"] == "owner/model"
    tensors = load_file(tmp_path / "some" / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{m}.lora_{w}.weight" for m in whole for w in "AB"}
    _, every = adapted(tmp_path / "m", ("*_proj",))
    every.write(tmp_path / "all", "m")
    names = json.loads((tmp_path / "all" / "adapter_config.json").read_text())["target_modules"]
    assert names == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize("kind", ["dora", "bias", "saved", "tokens", "table"])
def test_adapters_of_others_are_merged(kind: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama", attention_bias=kind == "bias")
    layout = Layout(oracle, 3)
    {
        "dora": lambda: layout.low_rank("q_proj", "down_proj", dora=True),
        "bias": lambda: layout.low_rank("k_proj", "o_proj", bias=True, ranks={"o_proj": 7}),
        "saved": lambda: layout.saved("lm_head", "embed_tokens"),
        "tokens": lambda: layout.tokens([3, 5, 17]),
        "table": lambda: layout.low_rank("embed_tokens", "lm_head", "v_proj"),
    }[kind]()
    write_merged(str(tmp_path / "m"), layout.write(tmp_path / "a"), tmp_path / "out")
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), [3, 4, 5, 9, 17, 20, 3]
    assert relative_error(logits(again, tokens), logits(layout.merged, tokens)) < TOLERANCE
    assert relative_error(logits(again, tokens), logits(oracle, tokens)) > 0.01, "it changes what the model says"


def test_what_has_no_place_in_a_checkpoint_is_not_merged(tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama", tie_word_embeddings=True)
    net = Net.open(str(tmp_path / "m"))
    biased = Layout(oracle, 1).low_rank("q_proj", bias=True).write(tmp_path / "b")
    with pytest.raises(ModelError, match=r"q_proj\.bias, and the model has none there; serve it as an adapter"):
        merge_adapter(net, biased)
    head = Layout(oracle, 1).saved("lm_head").write(tmp_path / "h")
    with pytest.raises(ModelError, match="which are one here, unlike"):
        merge_adapter(net, head)
    with pytest.raises(ConfigError, match=r"--targets 'w1' matches no matrix of m; known: down_proj, gate_proj"):
        target_modules(net, ("w1",))


def test_codes_are_the_nearest_of_the_book() -> None:
    w = torch.randn((48, 320), generator=torch.Generator().manual_seed(0)) * 0.05
    w[3, :64] = 0.0
    made = PackedNf4.of(w, "w")
    blocks, scales = w.view(-1, fp4.NF4_BLOCK), made.nested.scales()
    top = blocks.abs().amax(1)
    choices = torch.tensor(NF4_NUMBERS)[None] * top[:, None]  # codes are found by the scales before they are rounded
    nearest = (blocks[..., None] - choices[:, None]).abs().argmin(-1)
    numbers = torch.tensor(NF4_NUMBERS)[nearest] * scales[:, None]
    got = made.dequantize().view(-1, fp4.NF4_BLOCK)
    assert torch.allclose(got[top > 0], numbers[top > 0], atol=1e-7) and not bool(got[top == 0].any())
    served, nested = fp4.nf4(w)
    assert torch.equal(made.nested.codes, nested.codes)
    assert torch.allclose(made.dequantize(), served.dequantize(), atol=2e-5 * float(w.abs().max()))
    assert made.nbytes * 8 / w.numel() < 4.13
    with pytest.raises(ConfigError, match=r"b: \[3, 5\] is not a multiple of 64 numbers, as NF4 needs; use lora"):
        PackedNf4.of(torch.zeros(3, 5), "b")
    with pytest.raises(ConfigError, match="b: holds nan or inf"):
        PackedNf4.of(torch.full((1, 64), torch.nan), "b")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_frozen_base_is_codes(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    net, lora = adapted(tmp_path, ("*",))
    plain = {
        m.name: net.opened.source.tensor(m.name).numel() for m in linear_modules(net.opened) if m.layer is not None
    }
    taken = quantize_base(net)
    assert set(net.parametrized.frozen) == set(plain) and taken <= sum(plain.values()) * 4.3 / 8
    assert not any(net.tensors.was_set(name) for name in net.tensors), "nothing of the base is kept beside them"
    found = gradients(net, lora.parameters, True)
    dense, other = adapted(tmp_path, ("*",))
    for name in plain:
        frozen = dense.parametrized.frozen[name] = net.parametrized.frozen[name]
        assert not torch.equal(frozen.dequantize(), ParametrizedNet.of(str(tmp_path)).parametrized.tensor(name))
    wanted = gradients(dense, other.parameters)
    assert all(torch.allclose(found[n], wanted[n], atol=1e-6) for n in found) and len(found) == 2 * len(
        adaptable_modules(net)
    )


def test_checkpointing_changes_no_gradient_and_keeps_little(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", num_hidden_layers=6, head_dim=16)
    net, lora = adapted(tmp_path, ("*",))
    sizes: dict[bool, int] = {}
    found: dict[bool, dict[str, Tensor]] = {}
    for checkpointing in (False, True):
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = CrossEntropy().loss(net, collate(list(enumerate(ROWS))), checkpointing)
        sizes[checkpointing] = sum(saved.values())
        for p in lora.parameters.values():
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        found[checkpointing] = {n: p.grad for n, p in lora.parameters.items() if p.grad is not None}
    assert all(torch.equal(found[True][n], found[False][n]) for n in lora.parameters)
    assert sizes[True] < sizes[False] / 4


def test_tables_around_the_layers_are_made_once_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps read the same again at once: nothing of it is given back, and tables that nobody changes are kept."""
    write(tmp_path, "llama", tie_word_embeddings=False)
    net, lora = adapted(tmp_path, ("*q_proj",))
    read: list[str] = []
    original = net.tensors.source.tensor
    monkeypatch.setattr(net.tensors.source, "tensor", lambda name: (read.append(name), original(name))[1])
    monkeypatch.setattr(net.tensors.source, "give_back", lambda: read.append("given back"))
    first = gradients(net, lora.parameters)
    read.clear()
    second = gradients(net, lora.parameters)
    assert read and not {"model.embed_tokens.weight", "lm_head.weight", "given back"} & set(read)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    tokens = prompt(9, 4)
    before = logits_of(net, tokens)
    net.set("lm_head.weight", 2 * net.tensors["lm_head.weight"])
    assert torch.allclose(logits_of(net, tokens), 2 * before, atol=1e-5)
    leaf = net.require_grad(["lm_head.weight"])["lm_head.weight"]
    assert len(gradients(net, {"head": leaf})) == 1
