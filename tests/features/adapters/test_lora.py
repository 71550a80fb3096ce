"""LoRA adapters: logits equal those of merged weights, rows with unlike adapters in one batch, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_adapters import FACTS, TARGETS, write_adapter
from lora_adapters import merged_by_hand as merged
from lora_adapters import run_adapted as run
from model_variants import LATENTS as LATENT_MODELS
from model_variants import MIXTURES
from oracle import BACKENDS, backend, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, prompt
from paths import DATA
from quire import LLM, LoRARequest, SamplingParams
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError, QuireError
from quire.core.request import Request
from quire.engine.client import AdapterChanged, ChangeAdapter
from quire.model.build import load_model
from tiny_model import OPTIONS, write_tiny

Tensors = dict[str, Tensor]
LATENT, EXPERTS = LATENT_MODELS["deepseek_v2"][1], MIXTURES["qwen3_moe"][1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", TARGETS)
def test_logits_equal_merged_weights_in_mixed_batches(family: str, name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", family, **FACTS.get(family, {}))
    one = write_adapter(tmp_path / "a", oracle, TARGETS[family], 1)
    two = write_adapter(tmp_path / "b", oracle, TARGETS[family][:1], 2, r=9, use_rslora=True)
    modules = (f"one={one}", f"two={two}")
    ops = backend(name)
    model = load_model(flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=modules), ops)
    oracles = [merged(oracle, one, 6 / 4), merged(oracle, two, 6 / 3), oracle]
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    names = ["one", "two", ""]
    for cut in CUTS.values():
        for got, tokens, want in zip(run(model, sequences, names, cut), sequences, oracles, strict=True):
            assert relative_error(got, logits(want, tokens)) <= TOLERANCE
    mixed = run(model, sequences, names, CUTS["whole"])
    for i, cut in enumerate([[[19]], [[7]], [[1]]]):
        (alone,) = run(model, sequences[i : i + 1], names[i : i + 1], cut)
        assert name == "reference" or torch.equal(alone, mixed[i]), "a row must not depend on its batch"


def greedy(llm: LLM, prompts: list[list[int]], lora: Any = None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=lora)
    return [list(f.outputs[0].token_ids) for f in found]


def test_requests_choose_adapters_and_share_no_prefix(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    oracle = write(folder, "llama", vocab_size=99)
    loras: list[LoRARequest | None] = [None]
    for i in (1, 2):
        path = write_adapter(tmp_path / str(i), oracle, TARGETS["llama"], i)
        loras.append(LoRARequest(f"adapter{i}", i, str(path)))
    prompts = [prompt(20, 5)] * 3
    with LLM(folder, enable_lora=True, max_loras=2, num_blocks=64, block_size=4, max_num_seqs=8) as llm:
        mixed = greedy(llm, prompts, loras)
        assert len({tuple(t) for t in mixed}) == 3, "the adapters are meant to change the text"
        for lora, want in zip(loras, mixed, strict=True):
            assert greedy(llm, prompts[:1], lora) == [want], "a warm prefix of another adapter must not be found"
        merged(oracle, tmp_path / "1", 6 / 4).save_pretrained(tmp_path / "merged")
        with pytest.raises(ConfigError, match="another folder"):
            greedy(llm, prompts[:1], LoRARequest("adapter1", 1, str(tmp_path / "2")))
        with pytest.raises(ConfigError, match="max-loras 2"):
            greedy(llm, prompts[:1], LoRARequest("third", 3, str(tmp_path / "1")))
    with LLM(tmp_path / "merged", num_blocks=64, block_size=4) as llm:
        assert greedy(llm, prompts[:1]) == [mixed[1]]


def parts_of(made: Tensors, start: str) -> Tensors:
    return {name.removeprefix(start): t.float() for name, t in made.items() if name.startswith(start)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_are_those_of_peft(family: str, name: str, tmp_path: Path) -> None:
    path = DATA / "peft_adapters.safetensors"  # written by PEFT: data/make_peft_adapters.py
    made = load_file(path)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    (tmp_path / "a").mkdir()
    (tmp_path / "config.json").write_text(metadata[f"{family}.config"])
    (tmp_path / "a" / "adapter_config.json").write_text(metadata[f"{family}.adapter_config"])
    save_file(parts_of(made, f"{family}.base."), tmp_path / "model.safetensors")
    save_file(parts_of(made, f"{family}.adapter."), tmp_path / "a" / "adapter_model.safetensors")
    options = {"enable_lora": True, "lora_modules": (f"a={tmp_path / 'a'}",)}
    model = load_model(flat_config(model=str(tmp_path), **options), backend(name))
    (got,) = run(model, [list(range(3, 15))], ["a"], [[12]])
    (plain,) = run(model, [list(range(3, 15))], [""], [[12]])
    assert relative_error(got, made[f"{family}.want"]) <= TOLERANCE < relative_error(plain, made[f"{family}.want"])


def test_an_adapter_in_use_stays_and_its_place_is_left_clean(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    oracle = write(folder, "llama", vocab_size=99)
    one = write_adapter(tmp_path / "one", oracle, TARGETS["llama"], 1, r=8)
    two = write_adapter(tmp_path / "two", oracle, ("v_proj",), 2)
    tokens = prompt(20, 5)
    with LLM(folder, enable_lora=True, max_loras=1, num_blocks=64, block_size=4) as llm:
        engine = llm.engine.engine
        greedy(llm, [tokens], LoRARequest("a", 1, str(one)))
        engine.submit(
            Request(id="r", prompt=tuple(tokens), params=SamplingParams(max_tokens=9), seed=1, arrival=0.0, adapter="a")
        )
        engine.step()
        changed = engine.adapting.change(ChangeAdapter("a", ""))
        assert "used by 1 requests" in changed.error and changed.adapters == ("a",)
        engine.abort("r")
        assert engine.adapting.change(ChangeAdapter("a", "")) == AdapterChanged("a", ())
        assert "not loaded" in engine.adapting.change(ChangeAdapter("a", "")).error
        again = greedy(llm, [tokens], LoRARequest("a", 1, str(two)))
    with LLM(folder, enable_lora=True, max_loras=1, num_blocks=64, block_size=4) as llm:
        assert greedy(llm, [tokens], LoRARequest("a", 1, str(two))) == again
        assert "enable_lora" not in llm.engine.engine.adapting.change(ChangeAdapter("b", str(one))).error
    with LLM(folder, num_blocks=64) as llm:
        assert "enable_lora" in llm.engine.engine.adapting.change(ChangeAdapter("a", "")).error


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "bias": ({"bias": "all"}, "bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "a pattern that takes for ever": (
        {"alpha_pattern": {"(a+)+": 3}},
        r"alpha_pattern: \(a\+\)\+: is too long, repeats",
    ),
    "no pattern": ({"rank_pattern": {"q[": 3}}, r"rank_pattern: q\[: is not a pattern of names"),
    "a rank of a pattern": ({"rank_pattern": {"v_proj": 40}}, "rank_pattern: v_proj|v_proj: is 40; --max-lora-rank 16"),
    "another rank": ({"rank_pattern": {"q_proj": 3}}, "q_proj: lora_A .* rank 3, which adapter_config.json says"),
    "kind": ({"peft_type": "IA3"}, "peft_type"),
    "rank": ({"r": 32}, "max-lora-rank 16"),
    "alpha": ({"lora_alpha": None}, "lora_alpha"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'.*path_initial_model_for_weight_conversion"),
    "pissa by steps": ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
    "olora": ({"init_lora_weights": "OLoRA"}, "init_lora_weights: 'OLoRA'.*path_initial_model"),
    "corda": ({"init_lora_weights": "corda"}, "init_lora_weights: 'corda'.*path_initial_model"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq'.*merge_and_unload"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "init_lora_weights: 'lora_ga'.*merge_and_unload"),
    "a start nobody knows": ({"init_lora_weights": 3}, "init_lora_weights: 3"),
    "activated": ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens: .*from its invocation tokens on"),
    "block-diagonal": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    "routed": ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    "singular values": ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "a field of tomorrow": ({"twisted_lora": 2}, "twisted_lora: 2 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    oracle = write(tmp_path / "m", "llama")
    folder = write_adapter(tmp_path / "a", oracle, ("q_proj",), 1, **config)
    options = flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=(f"a={folder}",))
    with pytest.raises(QuireError, match=message):
        load_model(options, backend("reference"))


def test_fields_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    """Those of a plain adapter as PEFT 0.21 writes it, and starts that leave the base as it is."""
    oracle = write(tmp_path / "m", "llama")
    harmless: dict[str, Any] = {
        "alora_invocation_tokens": None, "arrow_config": None, "auto_mapping": {"unsloth_fixed": True},
        "base_model_name_or_path": "x", "bias": "none", "ensure_weight_tying": False, "exclude_modules": None,
        "fan_in_fan_out": True, "inference_mode": True, "layers_to_transform": [0, 1], "loftq_config": {},
        "lora_bias": False, "lora_dropout": 0.1, "megatron_core": "megatron.core", "modules_to_save": None,
        "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "task_type": "CAUSAL_LM",
        "use_dora": False, "use_qalora": False,
    }  # fmt: skip
    for i, start in enumerate((True, False, None, "gaussian", "eva", "orthogonal", "mica")):
        folder = write_adapter(tmp_path / str(i), oracle, ("q_proj",), 1, init_lora_weights=start, **harmless)
        options = flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=(f"a={folder}",))
        load_model(options, backend("reference"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers.0.self_attn.q_proj", "layers.0.self_attn.r_proj", "r_proj: no matrix"),
        ("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj", "layers.7"),
        ("q_proj.lora_A", "q_proj.lora_embedding_A", "only one of"),
        ("q_proj.lora_A.weight", "q_proj.lora_C", "neither a lora_A"),
        ("q_proj.lora_B", "k_proj.lora_B", "only one of"),
        ("self_attn.q_proj", "self_attn.v_proj", "do not fit"),
        ("model.layers.0.self_attn.q_proj", "lm_head", "lm_head: lora_A .* do not fit"),
    ],
)
def test_tensors_that_fit_nowhere_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama")
    path = write_adapter(tmp_path / "a", oracle, ("q_proj",), 1) / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    options = flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=(f"a={tmp_path / 'a'}",))
    with pytest.raises(QuireError, match=message):
        load_model(options, backend("reference"))


@pytest.mark.parametrize(
    ("family", "facts", "target"),
    [
        ("deepseek_v2", LATENT, "q_a_proj"),
        ("deepseek_v2", LATENT, "kv_a_proj_with_mqa"),
        ("deepseek_v2", LATENT, "kv_b_proj"),
        ("qwen3_moe", EXPERTS, "mlp.experts.0.up_proj"),
        ("qwen3_moe", EXPERTS, "mlp.gate"),
    ],
)
def test_matrices_without_room_are_refused_not_left_out(
    family: str, facts: dict[str, Any], target: str, tmp_path: Path
) -> None:
    """Latents and experts beside an attention matrix that could be adapted: all of the adapter or nothing."""
    oracle = write(tmp_path / "m", family, **facts)
    folder = write_adapter(tmp_path / "a", oracle, ("o_proj",), 1)
    options = flat_config(model=str(tmp_path / "m"), enable_lora=True, lora_modules=(f"a={folder}",))
    load_model(options, backend("reference"))
    tensors = load_file(folder / "adapter_model.safetensors")
    place = f"model.layers.1.{target if '.' in target else f'self_attn.{target}'}"
    for part, shape in (("A", (4, 64)), ("B", (64, 4))):
        tensors[f"base_model.model.{place}.lora_{part}.weight"] = torch.ones(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"{place}: no matrix of that name .* experts, routers, latent attention"):
        load_model(options, backend("reference"))


def test_modules_need_room(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        flat_config(lora_modules=("a=b",))
    with pytest.raises(ConfigError, match="name=folder"):
        load_model(
            flat_config(model=str(write_tiny(tmp_path)), enable_lora=True, lora_modules=("a",), load_format="dummy"),
            backend("reference"),
        )
    assert OPTIONS
