"""A checkpoint as a function of its tensors: logits and gradients of every tensor on disk equal transformers'."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.engine.memory import memory, write_zeros
from net_checks import ALL, ENCODED, LLAMA, PROCESS, SOURCE, error, oracle_logits, random_tokens
from often import one_of
from oracle import backend, edit_config, write
from paged_model import TOLERANCE, Paged, load
from quire.compress.checkpoint.linear_weights import matrices_by_role
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.core.errors import ConfigError, ModelError

GRADIENTS = ("llama", "llama_biases", "llama_tied", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "falcon_new",
             "bloom", "gptj", "phi3", "cohere_qk_norm", "stablelm_qk_norms", "opt_350m", "mixtral", "olmoe",
             "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_5", "qwen3_next", "lfm2",
             "granite4", "mamba2", "mamba", "falcon_h1", "kimi_linear")  # fmt: skip


def oracle_gradients(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The gradients as tensors on disk: saved in the place of the numbers, as transformers names and cuts those."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        for b in model.buffers():
            b.zero_()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", one_of(2, ALL))
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, facts = ALL[variant]
    oracle, tokens = write(tmp_path, family, **facts), random_tokens(2, 11)
    with torch.no_grad():
        net = Net.open(str(tmp_path))
        assert set(net.tensors) == set(load_file(tmp_path / "model.safetensors"))
        assert error(net.logits(tokens), oracle_logits(oracle, tokens)) <= TOLERANCE


@pytest.mark.parametrize("variant", ENCODED)
def test_logits_of_encoder_decoders_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, facts = ENCODED[variant]
    oracle, tokens, encoded = write(tmp_path, family, **facts), random_tokens(2, 9), random_tokens(2, 9, seed=2)
    net = Net.open(str(tmp_path))
    assert error(net.logits(tokens, encoded), oracle_logits(oracle, tokens, encoded)) <= TOLERANCE
    with pytest.raises(ConfigError, match="encoder"):
        net.logits(tokens)
    with pytest.raises(ModelError, match="an encoder made"):
        net.layer(0)


@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "deepseek_v3"])
def test_logits_equal_the_engines_reference(variant: str, tmp_path: Path) -> None:
    family, facts = ALL[variant]
    write(tmp_path, family, **facts)
    tokens = random_tokens(1, 19)
    (want,) = Paged(load(tmp_path, backend("reference")), tokens.tolist()).run([[19]])
    assert error(Net.open(str(tmp_path)).logits(tokens)[0], want) <= TOLERANCE


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", [*GRADIENTS, "t5", "t5_v1_1"])
def test_gradients_of_every_tensor_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, facts = (ALL | ENCODED)[variant]
    oracle, tokens, targets = write(tmp_path, family, **facts), random_tokens(2, 11), random_tokens(2, 11, seed=3)
    encoded = random_tokens(2, 7, seed=2) if variant in ENCODED else None
    targets[0, 4:] = -100
    found = oracle_logits(oracle, tokens, encoded).flatten(0, 1)
    want_loss = torch.nn.functional.cross_entropy(found, targets.flatten())
    want_loss.backward()
    net = Net.open(str(tmp_path))
    leaves = net.require_grad(True)
    loss = net.loss(tokens, targets, encoded)
    loss.backward()
    assert error(loss, want_loss) <= TOLERANCE
    want = oracle_gradients(oracle, tmp_path / "gradients")
    assert set(want) == set(leaves)
    # A bias of keys without rope moves all scores of a query alike: what both have as its gradient is rounding, of
    # which 2e-9 of the largest gradient was seen.
    least = 1e-4 * max(float(w.abs().max()) for w in want.values())
    for name, w in want.items():
        grad = leaves[name].grad
        got = torch.zeros_like(w) if grad is None else grad
        assert float((got - w).abs().max()) <= 1e-4 * max(float(w.abs().max()), least), name


@pytest.mark.parametrize(
    "variant", ["llama", "opt_post_norm", "gemma3", "gpt2", "olmo2", "olmoe", "deepseek_v2", "qwen3_5"]
)
def test_layer_by_layer_is_the_whole(variant: str, tmp_path: Path) -> None:
    family, facts = ALL[variant]
    write(tmp_path, family, **facts)
    net, tokens = Net.open(str(tmp_path)), random_tokens(2, 9)
    with torch.no_grad():
        x, delta = net.enter(tokens), None
        for i in range(net.spec.layers):
            x, delta = net.run_layer(i, x, delta)
        assert delta is not None and x.shape == delta.shape == (2, 9, net.spec.hidden)
        assert error(net.leave(x, delta), net.logits(tokens)) <= 1e-6
        assert torch.equal(net.leave(x, delta, net.after_layers()), net.leave(x, delta))
        assert torch.equal(net.enter(tokens, net.before_layers()), net.enter(tokens))


@pytest.mark.parametrize("variant", ["llama", "opt_post_norm", "gemma3", "olmoe", "deepseek_v2", "qwen3_5"])
def test_sequences_one_after_the_other_do_not_see_each_other(variant: str, tmp_path: Path) -> None:
    family, facts = ALL[variant]
    write(tmp_path, family, **facts)
    net, rows = Net.open(str(tmp_path)), [random_tokens(1, n) for n in (9, 40, 9, 1)]
    lengths = torch.tensor([row.shape[1] for row in rows])
    with torch.no_grad():
        x, delta = net.enter(torch.cat(rows, 1), lengths=lengths), None
        for i in range(net.spec.layers):
            x, delta = net.run_layer(i, x, delta, lengths=lengths)
        assert delta is not None
        assert error(net.leave(x, delta), torch.cat([net.logits(row) for row in rows], 1)) <= TOLERANCE
    with pytest.raises(ConfigError, match=f"{lengths.sum() * 9} tokens were given"):
        net.enter(torch.cat(rows * 9, 1), lengths.sum(0, keepdim=True) * 9)


def test_layers_that_read_the_keys_of_another(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", num_hidden_layers=4, head_dim=16)
    edit_config(tmp_path, num_kv_shared_layers=2)
    tokens = random_tokens(1, 19)
    (want,) = Paged(load(tmp_path, backend("reference")), tokens.tolist()).run([[19]])
    net = Net.open(str(tmp_path))
    leaves = net.require_grad(True)
    logits = net.logits(tokens)
    assert error(logits[0], want) <= TOLERANCE
    logits.square().sum().backward()
    unread = {f"model.layers.{i}.self_attn.{p}.weight" for i in (2, 3) for p in ("k_proj", "v_proj", "k_norm")}
    assert {name for name, leaf in leaves.items() if leaf.grad is None} == unread
    with pytest.raises(ModelError, match="layer 2 reads what layer 1 made"):
        net.layer(2)


def test_a_layer_reads_its_own_tensors_as_they_are_now_and_is_freed(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    net, x = Net.open(str(tmp_path)), torch.randn(1, 5, 64)
    read: list[str] = []
    original = net.tensors.source.tensor
    net.tensors.source.tensor = lambda name: (read.append(name), original(name))[1]  # type: ignore[method-assign]
    layer = net.layer(1)
    assert read and all(name.startswith("model.layers.1.") for name in read)
    before = net.run_layer(1, x, None, layer)[1]
    name = "model.layers.1.mlp.down_proj.weight"
    net.set(name, torch.zeros_like(net.tensors[name]))
    assert torch.equal(net.run_layer(1, x, None, layer)[1], before)
    assert not bool(net.run_layer(1, x, None)[1].any())
    gone = weakref.ref(layer.qkv.weight.plain)
    del layer
    assert gone() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_walking_and_writing_take_the_memory_of_a_layer(tmp_path: Path) -> None:
    """Of 64 MiB in f32. 144, 49 and 40 MiB were measured: matrices that are fused are there twice for a moment."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 6}))
    write_zeros(tmp_path)
    net, layer = Net.open(str(tmp_path)), 2 * SOURCE["llama"] / LLAMA["num_hidden_layers"]

    def peak(run: Callable[[], object]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
        before = memory("VmRSS")
        run()
        return memory("VmHWM") - before

    def walk() -> None:
        x, delta = net.enter(random_tokens(2, 16)), None
        for i in range(net.spec.layers):
            x, delta = net.run_layer(i, x, delta)

    with torch.no_grad():
        walked, read = peak(walk), peak(lambda: [0 for _ in matrices_by_role(net)])
        written = peak(lambda: write_folder(tmp_path / "out", net.tensors, net.config, tmp_path, torch.bfloat16))
    assert walked <= 2 * layer + PROCESS
    assert max(read, written) <= layer + PROCESS


def seen_by(net: Net, run: Any) -> dict[tuple[str, int | None, int | None], Tensor]:
    seen: dict[tuple[str, int | None, int | None], Tensor] = {}
    with net.observe(lambda role, layer, expert, x: seen.__setitem__((role, layer, expert), x)):
        run()
    return seen


def test_observers_see_what_modules_of_transformers_read(tmp_path: Path) -> None:
    oracle, tokens = write(tmp_path, "llama"), random_tokens(2, 7)
    want: dict[str, Tensor] = {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: want.__setitem__(name, args[0].flatten(0, 1)))
    oracle_logits(oracle, tokens)
    net = Net.open(str(tmp_path))
    seen = seen_by(net, lambda: net.logits(tokens))
    names = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o", "gate": "mlp.gate",
             "up": "mlp.up", "down": "mlp.down"}  # fmt: skip
    assert len(seen) == len(want) == 7 * net.spec.layers + 1
    for (role, layer, expert), x in seen.items():
        name = "lm_head" if role == "head" else f"model.layers.{layer}.{names[role]}_proj"
        assert expert is None and not x.requires_grad and error(x, want[name]) <= TOLERANCE
    assert not net.ops.observers


def test_observers_see_latents_and_the_rows_of_each_expert(tmp_path: Path) -> None:
    family, facts = ALL["deepseek_v3"]
    oracle, tokens = write(tmp_path, family, **facts), random_tokens(2, 7)
    want: dict[int, Tensor] = {}
    for i, block in enumerate(oracle.model.layers):
        block.self_attn.kv_b_proj.register_forward_pre_hook(
            lambda m, args, i=i: want.__setitem__(i, args[0].flatten(0, -2))
        )
    oracle_logits(oracle, tokens)
    net = Net.open(str(tmp_path))
    seen = seen_by(net, lambda: net.logits(tokens))
    for i, latents in want.items():
        assert error(seen["kv_b", i, None], latents) <= TOLERANCE
    counts = {key: len(x) for key, x in seen.items() if key[0] == "expert_gate"}
    assert all(expert is not None for _, _, expert in counts)
    routing, sparse = net.spec.moe.routing, sum(net.spec.moe.sparse)
    assert sum(counts.values()) == tokens.numel() * routing.top_k * sparse
    assert counts == {("expert_gate", *k[1:]): len(x) for k, x in seen.items() if k[0] == "expert_down"}


def test_a_tied_table_is_the_head_to_observers(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=True)
    net = Net.open(str(tmp_path))
    seen = seen_by(net, lambda: net.logits(random_tokens(1, 5)))
    assert ("head", None, None) in seen and "embed" not in {role for role, _, _ in seen}


def test_what_cannot_be_set_or_learnt_from_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    net, tokens = Net.open(str(tmp_path)), random_tokens(1, 5)
    with pytest.raises(ModelError, match=r"lm_head\.bias is not a tensor"):
        net.set("lm_head.bias", torch.zeros(99))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[64\], not \[63\]"):
        net.set("model.norm.weight", torch.zeros(63))
    with pytest.raises(ModelError, match="nothing is not a tensor"):
        net.decoder(requires_grad=["nothing"])
    for run in (net.logits, net.enter):
        with pytest.raises(ConfigError, match="has 128 positions, 129 tokens were given"):
            run(random_tokens(1, 129))
    with pytest.raises(ConfigError, match="nothing to learn from"):
        net.loss(tokens, torch.full_like(tokens, -100))


def test_some_tensors_are_leaves_and_the_file_is_not_written_to(tmp_path: Path) -> None:
    write(tmp_path, "llama", dtype=torch.bfloat16)
    held = (tmp_path / "model.safetensors").read_bytes()
    net, tokens, name = Net.open(str(tmp_path)), random_tokens(1, 5), "model.layers.0.mlp.up_proj.weight"
    decoder = net.decoder(requires_grad=[name])
    net.logits(tokens, decoder=decoder).square().sum().backward()
    assert net.tensors[name].grad is not None and net.tensors[name].dtype is torch.float32
    assert [n for n in net.tensors if net.tensors[n].requires_grad] == [name]
    with torch.no_grad():
        net.tensors[name].sub_(1.0)
    assert (tmp_path / "model.safetensors").read_bytes() == held
    del net.tensors[name]
    assert torch.equal(net.tensors[name].bfloat16(), load_file(tmp_path / "model.safetensors")[name])
