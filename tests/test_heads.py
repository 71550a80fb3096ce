"""Heads that draft from hidden rows: what they read, their logits against plain torch, and folders that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from head_folders import saved, write_medusa
from oracle import BACKENDS, write
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.model.net.tapped import Taps
from quire.speculate.medusa import MedusaDrafter
from test_bit_equality import engine_of
from test_speculation import PYDOC

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PROMPT = (9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17)


def engine_with(folder: Path, method: str, **options: Any) -> Engine:
    """The embedded model in f32 with these heads, always drafting."""
    asked = json.dumps({"method": method, "model": str(folder), "adaptive": False})
    return engine_of(**{"dtype": "float32", "speculative_config": asked} | options).engine


def start(engine: Engine, prompt: tuple[int, ...] = PROMPT, tokens: int = 9) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="r", prompt=prompt, params=params, seed=1, arrival=0.0))


def hidden_states(tokens: list[int]) -> tuple[Tensor, ...]:
    """transformers' of the embedded model: the stream before each layer, then past the last norm; each [n, hidden]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    with torch.no_grad():
        return tuple(h[0] for h in model(torch.tensor([tokens]), output_hidden_states=True).hidden_states)


def relative(found: Tensor, want: Tensor) -> float:
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("layers", [(), (2, 3, 3)])
@pytest.mark.parametrize("every", [False, True])
def test_hidden_rows_are_those_of_the_definition(layers: tuple[int, ...], every: bool) -> None:
    if layers and not every:
        pytest.skip("nothing asks for it")
    from quire.engine import engine as module

    engine = engine_of(dtype="float32").engine
    taps = Taps(layers, every)
    runner = module.Runner(engine.model, engine.ops, engine.kv, engine.scheduler.config, True, (), taps)
    runner.caches.own[:] = engine.runner.caches.own
    runner.caches.of_layer[:] = engine.runner.caches.of_layer
    runner.step.caches.of_layer[:] = engine.runner.step.caches.of_layer
    plain, engine.runner = engine.runner, runner
    start(engine)
    engine.step()
    states = hidden_states(list(PROMPT))
    want = torch.cat([states[i] for i in layers], 1) if layers else states[-1]
    want = want if every else want[-1:]
    assert relative(runner.step.hidden[: len(want)], want) < 2e-5
    (seq,) = engine.scheduler.running
    for _ in range(3):  # recorded, then replayed
        engine.step()
    states = hidden_states(seq.tokens[:-1])
    want = torch.cat([states[i] for i in layers], 1) if layers else states[-1]
    assert relative(runner.step.hidden[:1], want[-1:]) < 2e-5
    assert plain.step.hidden.numel() == 0, "nobody asked"


def medusa_by_hand(folder: Path, h: Tensor, own: bool, vocab: int) -> list[Tensor]:
    """Logits [n, V] of each head by their papers' formula."""
    tensors = {k.removeprefix("medusa_heads."): t for k, t in load_file(folder / "model.safetensors").items()}
    tensors = {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()}
    found = []
    for i in range(3):
        x = h
        for j in range(2):
            name = f"{i}.{j}.linear" if own else f"blocks.{i}.layers.{j}"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(())))
        logits = x @ tensors[f"{i}.2.weight" if own else f"lm_heads.{i}.weight"].T
        if not own:
            ids = tensors["token_map"]
            known = logits if logits.shape[1] == len(ids) else logits[:, ids]
            logits = torch.full((len(h), vocab), -torch.inf).index_copy_(1, ids, known)
        found.append(logits)
    return found


@pytest.mark.parametrize("own", [True, False], ids=["authors", "vllm"])
def test_medusa_says_what_its_formula_says(own: bool, tmp_path: Path) -> None:
    engine = engine_with(write_medusa(tmp_path / "m", 256, 6144, blocks=2, own=own), "medusa")
    assert engine.speculator is not None
    drafter = engine.speculator.proposer
    assert isinstance(drafter, MedusaDrafter)
    h = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    want = medusa_by_hand(tmp_path / "m", h, own, 6144)
    for head, logits in zip(drafter._medusa.heads, want, strict=True):
        found = drafter._logits(head, h).clone()
        finite = logits.isfinite()
        assert torch.equal(found.isfinite(), finite)
        assert relative(found[finite], logits[finite]) < 1e-5


def test_medusa_drafts_from_the_row_of_the_last_token(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 256, 6144)
    engine = engine_with(folder, "medusa")
    start(engine)
    for _ in range(4):
        engine.step()
    (seq,) = engine.scheduler.running
    assert engine.speculator is not None
    engine.speculator.draft()
    tensors = load_file(folder / "model.safetensors")
    h = hidden_states(seq.tokens[:-1])[-1][-1:]
    by_hand = []
    for i in range(3):
        x = h + silu(h @ tensors[f"{i}.0.linear.weight"].float().T + tensors[f"{i}.0.linear.bias"].float())
        by_hand.append(int((x @ tensors[f"{i}.1.weight"].float().T).argmax()))
    assert seq.draft == by_hand


def refusal(folder: Path, method: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        engine_with(folder, method, **options)
    return error.value.message


def test_medusa_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    other = refusal(write_medusa(tmp_path / "a", 64, 6144), "medusa")
    assert "0.0.linear.weight is [64, 64], the target needs [256, 256]" in other
    words = refusal(write_medusa(tmp_path / "b", 256, 99), "medusa")
    assert "0.1.weight is [99, 256], the target needs [6144, 256]" in words
    assert "hidden_size: is 64" in refusal(write_medusa(tmp_path / "c", 64, 99, own=False), "medusa")
    more = write_medusa(tmp_path / "d", 256, 6144)
    tensors = load_file(more / "model.safetensors")
    saved(more, {}, tensors | {"0.0.gate.weight": torch.zeros(3)})
    assert "nothing reads the tensor 0.0.gate.weight" in refusal(more, "medusa")
    saved(more, {}, {"x": torch.zeros(3)})
    assert "nothing reads the tensor x" in refusal(more, "medusa")
    (more / "model.safetensors").unlink()
    (more / "medusa_lm_head.pt").write_bytes(b"pickle")
    assert "medusa_lm_head.pt), which can run code" in refusal(more, "medusa")


def test_more_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 256, 6144)
    asked = json.dumps({"method": "medusa", "model": str(folder), "num_speculative_tokens": 4})
    assert "has 3 heads" in refusal(folder, "medusa", speculative_config=asked)


def test_models_without_hidden_rows_take_no_heads(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "m", 64, 99)
    t5 = tmp_path / "t5"
    write(t5, "t5", decoder_start_token_id=0)
    assert "encoder-decoder models are not drafted for" in refusal(folder, "medusa", model=str(t5))
