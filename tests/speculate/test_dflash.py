"""Layers that draft a block at once: against their formula in plain torch, and folders that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from engine_answers import engine_of
from head_folders import saved, write_dflash
from head_layers import hidden_states, rms, turned
from oracle import BACKENDS
from quire.core.errors import ConfigError, ModelError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.model.disk.hf_config import HfConfig
from quire.model.families.dflash import read_blocks
from quire.model.families.find import read_spec
from quire.run.step_sizes import LOGITS_AT_ONCE
from quire.speculate.dflash_drafter import DFlashDrafter
from speculation_methods import PYDOC
from turns import working

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PROMPT = (9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17)
LAYERS = (0, 2)
SIGHTS: dict[str, dict[str, Any]] = {
    "all see all": {},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "is_causal": False},
    "causal windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
}


def engine_with(folder: Path, **options: Any) -> Engine:
    asked = {"method": "dflash", "model": str(folder), "adaptive": False}
    return engine_of(dtype="float32", speculative_config=json.dumps(asked), **options).engine


def start(engine: Engine, name: str, prompt: tuple[int, ...], tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id=name, prompt=prompt, params=params, seed=1, arrival=0.0))


def seen_by(sight: dict[str, Any], layer: int, first: int, total: int) -> Tensor:
    """Which of `total` positions each row of a block from `first` on sees in `layer`."""
    rows, keys = torch.arange(first, total)[:, None], torch.arange(total)
    if sight.get("layer_types", ["full_attention"] * 2)[layer] == "full_attention":
        return (rows >= 0) & (keys >= 0)
    if sight.get("is_causal", True):
        return (keys <= rows) & (keys > rows - sight["sliding_window"])
    return (rows >= 0) & (keys >= total - (sight["sliding_window"] + 7))  # the block of 8 looks back from its end


def block_by_hand(folder: Path, tokens: list[int], count: int, sight: dict[str, Any]) -> list[int]:
    """The tokens that a block behind `tokens` says, by the formula of the paper, in plain torch."""
    from transformers import AutoModelForCausalLM

    w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    target = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    seen = hidden_states(tokens[:-1])
    context = rms(torch.cat([seen[1 + i] for i in LAYERS], -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = target.get_input_embeddings().weight[[tokens[-1]] + [6143] * count].detach()
    n, total = len(context), len(context) + 1 + count
    for i, at in enumerate(("layers.0", "layers.1")):
        h = rms(x, w[f"{at}.input_layernorm.weight"])
        rows = torch.cat((context, h))
        q, k, v = ((rows @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(total, -1, 64) for name in ("q", "k", "v"))
        q, k = (turned(rms(t, w[f"{at}.self_attn.{name}_norm.weight"])) for t, name in ((q, "q"), (k, "k")))
        q, k, v = (t.transpose(0, 1) for t in (q[n:], k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen_by(sight, i, n, total))
        x = x + attended.transpose(0, 1).reshape(total - n, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = rms(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    logits: Tensor = target.get_output_embeddings()(rms(x[1:], w["norm.weight"]))
    return [int(token) for token in logits.argmax(-1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sight", SIGHTS)
def test_blocks_say_what_their_formula_says(sight: str, tmp_path: Path) -> None:
    """Over a prompt in chunks, in the middle of an answer, of two sequences at once, after drafts that were lost."""
    folder = write_dflash(tmp_path / "d", 256, 6144, LAYERS, **SIGHTS[sight])
    engine = engine_with(folder, max_num_batched_tokens=32, max_num_seqs=2)
    start(engine, "long", PROMPT * 4, 24)
    start(engine, "short", PROMPT[::-1], 24)
    seen = 0
    for _ in working(engine):
        engine.step()
        ready = [seq for seq in engine.scheduler.running if 1 < len(seq.output) < 12]
        if not ready or seen > 5:
            continue
        assert engine.speculator is not None
        engine.speculator.draft()
        for seq in ready:
            found = seq.draft.tokens
            if found:
                assert len(found) == 7
                assert found == block_by_hand(folder, seq.tokens, 7, SIGHTS[sight])
                seen += 1
    assert seen > 3


def test_the_assistant_of_muse_glimmer_drafts_what_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    config = MuseGlimmerAssistantConfig(
        hidden_size=256, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, block_size=8, mask_token_id=6143, target_layer_ids=list(LAYERS), bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.06 if p.ndim > 1 else 0.2) + float(p.ndim == 1))
    model.save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    engine = engine_with(tmp_path)
    start(engine, "a", PROMPT * 3, 12)
    seen = 0
    for _ in working(engine):
        engine.step()
        for seq in engine.scheduler.running:
            assert engine.speculator is not None
            engine.speculator.draft()
            if not seq.draft.tokens:
                continue
            states, n, cache = hidden_states(seq.tokens[:-1]), len(seq.tokens) - 1, DFlashCache(config=config)
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(n)
            with torch.no_grad():
                block = torch.tensor([seq.tokens[-1], *[6143] * 7])
                said = model(
                    noise_embeds=target.get_input_embeddings()(block)[None],
                    context_hidden_states=torch.cat([states[1 + i] for i in LAYERS], -1)[None],
                    position_ids=torch.arange(n + 8)[None],
                    past_key_values=cache,
                ).last_hidden_state[0, 1:]
                want = target.get_output_embeddings()(said).argmax(-1).tolist()
            assert seq.draft.tokens == want[: len(seq.draft.tokens)]
            seen += 1
    assert seen > 2


def test_the_drafts_of_a_smaller_step_are_as_many_as_it_has_rows(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path / "d", 256, 6144, LAYERS)
    engine = engine_with(folder, max_num_batched_tokens=5, max_num_seqs=1)
    start(engine, "a", PROMPT, 12)
    assert engine.speculator is not None
    seen = set[int]()
    for _ in working(engine):
        engine.step()
        engine.speculator.draft()
        seen.update(len(seq.draft.tokens) for seq in engine.scheduler.running)
    assert max(seen) == 4, "of five rows one is the last token's"


def test_blocks_of_many_sequences_take_several_passes_of_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash(tmp_path / "d", 256, 6144, LAYERS)
    engine = engine_with(folder, max_num_batched_tokens=1024, max_num_seqs=64)
    assert engine.speculator is not None and isinstance(engine.speculator.proposer, DFlashDrafter)
    assert engine.speculator.proposer._step.arrays.max_seqs == LOGITS_AT_ONCE < 64 * 8
    for i in range(40):
        start(engine, f"r{i}", PROMPT[: 3 + i % 7], 24)
    passes = list[list[int]]()
    draft = engine.speculator.proposer._draft
    monkeypatch.setattr(
        engine.speculator.proposer, "_draft", lambda now: (passes.append([count for _, count in now]), draft(now))
    )
    for _ in working(engine):
        engine.step()
    rows = [sum(1 + count for count in counts) for counts in passes]
    assert max(rows) == LOGITS_AT_ONCE
    assert (32 * 8, 8 * 8) in pairwise(rows), "40 blocks of 8 rows are two passes"


def test_rows_that_slid_out_of_a_window_while_drafts_rested_are_left_out(tmp_path: Path) -> None:
    """Rows wait for a draft for longer than the window is: what has no place any more is not written."""
    folder = write_dflash(tmp_path / "d", 256, 6144, LAYERS, **SIGHTS["causal windows"])
    asked = {"method": "dflash", "model": str(folder)}
    engine = engine_of(dtype="float32", block_size=4, speculative_config=json.dumps(asked)).engine
    assert engine.speculator is not None
    start(engine, "a", PROMPT, 200)
    for _ in working(engine):
        engine.step()
    assert engine.speculator.totals.tokens > 0, "it was tried"


def test_layers_are_named_as_many_as_there_are(tmp_path: Path) -> None:
    few = {"layer_types": ["sliding_attention"], "sliding_window": 12}
    assert "layer_types: names 1 layers" in refusal(write_dflash(tmp_path / "a", 256, 6144, LAYERS, **few))
    other = {"layer_types": ["chunked_attention"] * 2, "sliding_window": 12}
    assert "'chunked_attention' is not known" in refusal(write_dflash(tmp_path / "b", 256, 6144, LAYERS, **other))


def test_layers_of_the_target_are_counted_as_its_files_count_them(tmp_path: Path) -> None:
    """A layer of the files may be two of ours: what is read is behind the second one."""
    folder = write_dflash(tmp_path / "d", 256, 6144, LAYERS)
    config = HfConfig(json.loads((folder / "config.json").read_text()), "config.json")
    whole, _, _ = read_spec(json.loads((Path(PYDOC) / "config.json").read_text()), "pydoc")
    assert read_blocks(config, whole, "pydoc", 0)[1].target_layers == (1, 3)
    halves = replace(whole, file_layers=(0, 0, 1, 1, 2, 2))
    with pytest.raises(ModelError, match="needs layers of pydoc from 0 to 1"):
        read_blocks(config, halves, "pydoc", 0)
    config.raw["dflash_config"]["target_layer_ids"] = [0, 1]
    assert read_blocks(config, halves, "pydoc", 0)[1].target_layers == (2, 4)


def refusal(folder: Path, more: dict[str, Any] | None = None, **options: Any) -> str:
    asked = {"method": "dflash", "model": str(folder)} | (more or {})
    with pytest.raises(ConfigError) as error:
        engine_of(speculative_config=json.dumps(asked), **options)
    return error.value.message


def test_folders_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    assert "hidden_size: is 64" in refusal(write_dflash(tmp_path / "a", 64, 6144, LAYERS))
    assert "vocab_size: is 99" in refusal(write_dflash(tmp_path / "b", 256, 99, LAYERS))
    assert "target_layer_ids: is [0, 99]" in refusal(write_dflash(tmp_path / "c", 256, 6144, (0, 99)))
    good = write_dflash(tmp_path / "d", 256, 6144, LAYERS)
    eight = {"num_speculative_tokens": 8}
    assert "blocks of 8 draft 7 tokens; num_speculative_tokens is 8" in refusal(good, eight)
    assert "do not branch; leave out topk" in refusal(good, {"topk": 2})
    assert "the method 'dflash' read what other stages have" in refusal(good, pipeline_parallel_size=2)
    config = json.loads((good / "config.json").read_text())
    tensors = load_file(good / "model.safetensors")
    second = tensors | {"candidate_selector.successor_codebook": torch.zeros(6144, 8)}
    saved(tmp_path / "e", config, second)
    assert "by a selector and convolve rows (DFlash 2), which is not supported" in refusal(tmp_path / "e")
    config["dflash_config"] |= {"mask_token_id": 6144}
    saved(tmp_path / "f", config, tensors)
    assert "mask_token_id: is 6144" in refusal(tmp_path / "f")
