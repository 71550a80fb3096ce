"""Training that knows of rounding: what it sees is what is served, to the bit; and what was pruned stays so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracle import backend, relative_error, write
from paged_model import Paged, prompt
from quire.compress.checkpoint.writer import write_folder
from quire.compress.train.dataset import TrainingRow, collate
from quire.compress.train.objective import CrossEntropy, NetLearner
from quire.compress.train.parametrized import ParametrizedNet, PruningMasks, linear_modules, trainable_tensors
from quire.compress.train.qat import FakeQuantize, fake_quantize
from quire.core.config import flat_config
from quire.core.dtypes import F8, I8
from quire.core.errors import ConfigError
from quire.model.build import load_model
from quire.quant.registry import QUANTIZERS
from quire.training.loop import LearningSchedule, TrainingRun
from torch_weights import quantize_torch
from training_runs import Plan, logits_of

ROWS = [TrainingRow(prompt(24, seed)) for seed in range(4)]
KEPT = {"int8": I8, "fp8": F8}


def net_of(folder: Path, scheme: str, dtype: torch.dtype, kept: str = "") -> ParametrizedNet:
    net = ParametrizedNet.of(str(folder))
    fake_quantize(net, QUANTIZERS[scheme], 32, dtype, KEPT.get(kept))
    return net


def loss_of(net: ParametrizedNet) -> Any:
    return CrossEntropy().loss(net, collate(list(enumerate(ROWS))), False)


def served(folder: Path, tokens: list[int], **options: Any) -> Tensor:
    """The logits of the engine's definitions."""
    model = load_model(flat_config(model=str(folder), dtype="float32", group_size=32, **options), backend("reference"))
    (rows,) = Paged(model, [tokens]).step([len(tokens)])
    return rows


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_what_is_written_is_rounded_to_the_very_codes(scheme: str, family: str, tmp_path: Path) -> None:
    write(tmp_path / "m", family, dtype=torch.bfloat16, tie_word_embeddings=False)
    net = net_of(tmp_path / "m", scheme, torch.bfloat16)
    parameters = trainable_tensors(net, ())
    run = TrainingRun(
        NetLearner(net, parameters, CrossEntropy(), ROWS, 2, 0),
        LearningSchedule(2, 1e-3),
        Plan(2),
        tmp_path / "s.safetensors",
    )
    run.go(lambda step, loss: None)
    write_folder(tmp_path / "out", net.tensors, net.config, net.folder, torch.bfloat16)
    plain = ParametrizedNet.of(str(tmp_path / "out"))
    for m in linear_modules(plain.opened):
        w = plain.opened.source.tensor(m.name).detach()
        form = QUANTIZERS[scheme].head if m.role == "head" else QUANTIZERS[scheme]
        again = quantize_torch(form, w.t().contiguous() if m.transposed else w, 32).dequantize()
        seen = net.parametrized.tensor(m.name).detach()
        assert torch.equal(again, seen.t() if m.transposed else seen), m.name
    for name in ("model.norm.weight", "transformer.ln_f.weight"):
        if name in net.tensors:
            assert torch.equal(net.parametrized.tensor(name), plain.tensors[name])


@pytest.mark.parametrize("kept", ["", "int8", "fp8"])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_what_it_sees_is_what_is_served(scheme: str, kept: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen3", head_dim=16, tie_word_embeddings=False)
    tokens = prompt(40, 7)
    options = {"kv_cache_dtype": kept} if kept else {}
    want = served(tmp_path, tokens, quantization=scheme, **options)
    with torch.no_grad():
        got = logits_of(net_of(tmp_path, scheme, torch.float32, kept), tokens)
    # An activation near the middle of two codes may take either, so single logits differ by a code's worth.
    error = float((got - want).norm() / want.norm())
    others = [served(tmp_path, tokens), served(tmp_path, tokens, quantization=scheme)][: 2 if kept else 1]
    assert error < 1e-3 and all(float((got - o).norm() / o.norm()) > 4 * error for o in others)


def test_gradients_pass_straight_through(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=False)
    net = net_of(tmp_path, "int4", torch.float32)
    leaves = trainable_tensors(net, ())
    loss_of(net).backward()
    dense = ParametrizedNet.of(str(tmp_path))
    for name in leaves:
        dense.set(name, net.parametrized.tensor(name).detach().clone())
    dense.ops = net.ops
    wanted = trainable_tensors(dense, ())
    loss_of(dense).backward()
    for name, leaf in leaves.items():
        want = wanted[name].grad
        assert leaf.grad is not None and want is not None and relative_error(leaf.grad, want) < 1e-5


def test_it_learns_under_rounding(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=False)
    net = net_of(tmp_path, "int4", torch.bfloat16, "int8")
    run = TrainingRun(
        NetLearner(net, trainable_tensors(net, ()), CrossEntropy(), ROWS[:2], 2, 0),
        LearningSchedule(30, 0.01),
        Plan(30),
        tmp_path / "s",
    )
    run.go(lambda step, loss: None)
    assert run.losses[-1] < run.losses[0] / 2


def test_what_cannot_be_rounded_says_why(tmp_path: Path) -> None:
    write(tmp_path / "m", "llama", intermediate_size=80)
    with pytest.raises(ConfigError, match=r"the 80 columns of model\.layers\.0\.mlp\.down_proj\.weight are not a mult"):
        FakeQuantize(ParametrizedNet.of(str(tmp_path / "m")), QUANTIZERS["int4"], 32, torch.float32)
    write(tmp_path / "t", "t5")
    with pytest.raises(ConfigError, match="layers read what an encoder or other layers made; such models do not train"):
        ParametrizedNet.of(str(tmp_path / "t"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_was_pruned_stays_zero(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    path, made = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    pruned = [n for n, t in tensors.items() if n.endswith("weight") and t.ndim == 2 and (".mlp." in n or "attn" in n)]
    for name in pruned:
        tensors[name] = tensors[name] * (torch.rand(tensors[name].shape, generator=made) > 0.5)
    save_file(tensors, path, {"format": "pt"})
    net = ParametrizedNet.of(str(tmp_path))
    masks, leaves = PruningMasks(net), trainable_tensors(net, ())
    assert set(masks.masks) == set(pruned)
    net.parametrized.parametrizations.append(masks.value)
    run = TrainingRun(
        NetLearner(net, leaves, CrossEntropy(), ROWS, 2, 0),
        LearningSchedule(6, 0.01),
        Plan(6),
        tmp_path / "s.safetensors",
    )
    run.go(lambda step, loss: None)
    assert run.losses[-1] < run.losses[0]
    for name in pruned:
        assert torch.equal(leaves[name].detach() == 0, tensors[name] == 0)
        assert not torch.equal(leaves[name].detach(), tensors[name])


def test_some_tensors_are_chosen(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    net = ParametrizedNet.of(str(tmp_path))
    assert set(trainable_tensors(net, ("*layers.1*norm*",))) == {
        f"model.layers.1.{n}_layernorm.weight" for n in ("input", "post_attention")
    }
    with pytest.raises(ConfigError, match=r"--targets 'model\.nothing' matches no tensor of"):
        trainable_tensors(net, ("model.nothing",))
