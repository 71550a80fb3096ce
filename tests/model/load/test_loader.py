"""What is read from a model folder, and how one that is broken is refused: by name, with the reason and the way out."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loaded_folders import load, whole
from oracle import SMALL, backend, edit_config, logits, random_model, relative_error, write
from paged_model import prompt
from quire.core.config import flat_config
from quire.core.dtypes import named
from quire.core.errors import ConfigError, ModelError
from quire.model.build import load_model
from quire.model.describe import describe
from quire.model.families.find import read_spec

Edit = Callable[[Path], Any]


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite model.safetensors after `change` has edited its dict of tensors."""
    file = folder / "model.safetensors"
    content = load_file(file)
    change(content)
    save_file(content, file)


def header(folder: Path, old: bytes, new: bytes) -> None:
    """Replace bytes in the header of model.safetensors, without touching the data."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    changed = raw[8 : 8 + n].replace(old, new, 1)
    assert changed != raw[8 : 8 + n]
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + n :])


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def two_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({"lm_head.weight": load_file(file)["lm_head.weight"]}, folder / "b.safetensors")
    file.rename(folder / "a.safetensors")


Q2 = "model.layers.2.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
LEFT = {"model.layers.1.self_attn.sinks": torch.zeros(4)}
BROKEN: dict[str, tuple[Edit, list[str]]] = {
    "leftover": (lambda f: tensors(f, lambda t: t.update(LEFT)), ["no role", "model.layers.1.self_attn.sinks"]),
    "leftover norm bias": (lambda f: tensors(f, lambda t: t.update({"model.norm.bias": torch.zeros(64)})),
                           ["no role", "model.norm.bias"]),
    "norm without its partner": (lambda f: tensors(f, lambda t: t.update({Q2[:-13] + "q_norm.weight": torch.ones(16)})),
                                 ["missing", "self_attn.k_norm.weight"]),
    "missing": (lambda f: tensors(f, lambda t: t.pop(Q2)), ["missing", Q2, "role q"]),
    "missing head": (lambda f: tensors(f, lambda t: t.pop("lm_head.weight")), ["missing", "lm_head.weight"]),
    "missing bias": (lambda f: edit_config(f, mlp_bias=True), ["missing", "model.layers.0.mlp.gate_proj.bias"]),
    "bias of one layer": (lambda f: tensors(f, lambda t: t.update({Q2.replace("weight", "bias"): torch.zeros(64)})),
                          ["missing", "model.layers.0.self_attn.q_proj.bias"]),
    "shape": (lambda f: tensors(f, lambda t: t.update({DOWN: torch.zeros(64, 95)})), [DOWN, "[64, 95]", "[64, 96]"]),
    "shape by config": (lambda f: edit_config(f, intermediate_size=95), ["gate_proj.weight", "[96, 64]", "[95, 64]"]),
    "truncated": (truncate, ["model.safetensors", "truncated", "download it again"]),
    "lying shape": (lambda f: header(f, b"[99,64]", b"[98,64]"), ["model.safetensors", "download it again"]),
    "lying dtype": (lambda f: header(f, b'"F32"', b'"F16"'), ["model.safetensors", "download it again"]),
    "lying offset": (lambda f: header(f, b"[0,", b"[4,"), ["model.safetensors", "download it again"]),
    "integer weights": (lambda f: tensors(f, lambda t: t.update({DOWN: torch.zeros(64, 96, dtype=torch.int8)})),
                        [DOWN, "int8", "float"]),
    "pickled only": (to_pickle, ["pytorch_model.bin", "pickled", "save_pretrained"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no *.safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "twice": (two_files, ["lm_head.weight", "a.safetensors", "b.safetensors"]),
    "json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "json list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "object"]),
    "generation": (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 99}'),
                   ["generation_config.json", "eos_token_id", "98"]),
}  # fmt: skip
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": 65, "head_dim": None}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_attention_heads": -4}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"vocab_size": 1.5}, "vocab_size"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"hidden_act": "mish"}, "hidden_act"),
    ({"eos_token_id": 99}, "eos_token_id"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"model_type": "rwkv"}, "model_type"),
    ({"model_type": "rwkv", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ({"model_type": "nobody_s", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ({"model_type": 7}, "model_type"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"model_type": "opt", "_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    ({"model_type": "gpt_neo", "attention_types": [[["global"], 2]]}, "attention_types"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"model_type": "gptj", "rotary_dim": 7}, "rotary_dim"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
    ({"model_type": "mpt", "d_model": 64, "attn_config": {"alibi": False}}, "alibi"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "layer_types"),
]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    edit, words = BROKEN[name]
    edit(tmp_path)
    for attempt in (describe, load):
        with pytest.raises(ModelError) as caught:
            attempt(str(tmp_path))  # type: ignore[operator]
        assert all(w in caught.value.message for w in words), caught.value.message
        assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def plain_config() -> dict[str, Any]:
    return json.loads(random_model("llama").config.to_json_string())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fields", "word"), BAD_FIELDS)
def test_bad_config_field_is_refused_by_name(
    fields: dict[str, Any], word: str, plain_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain_config | fields))
    with pytest.raises(ModelError) as caught:
        describe(str(tmp_path), load_format="dummy")
    assert "config.json" in caught.value.message and word in caught.value.message


def test_sharded_checkpoint_and_its_defects(tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", shard="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    tokens = prompt(9, 1)
    assert relative_error(whole(load(tmp_path), tokens), logits(oracle, tokens)) <= 1e-5
    index = tmp_path / "model.safetensors.index.json"
    good = index.read_text()
    for bad, word in (
        (shards[0].name, "../x.safetensors"),
        (shards[0].name, shards[1].name),
        ('"weight_map"', '"map"'),
    ):
        index.write_text(good.replace(bad, word))
        with pytest.raises(ModelError, match="weight_map"):
            load(tmp_path)
    index.write_text(good)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"{shards[1].name} is missing"):
        load(tmp_path)


def test_old_files_load_with_inv_freq_buffers_and_old_rope_spelling(tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0})
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(3)}
    tensors(tmp_path, lambda t: t.update(buffers))
    edit_config(
        tmp_path, remove=("rope_parameters",), rope_theta=5e3, rope_scaling={"type": "linear", "factor": 2.0},
        auto_map={"AutoModelForCausalLM": "evil.Model"},
    )  # fmt: skip
    model = load(tmp_path)
    assert any("auto_map" in note for note in model.notes)
    tokens = prompt(9, 1)
    assert relative_error(whole(model, tokens), logits(oracle, tokens)) <= 1e-5


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bloom", "opt"])
def test_files_without_the_prefix_and_with_masks(family: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, family, **({"ffn_dim": 96, "word_embed_proj_dim": 64} if family == "opt" else {}))

    def as_first_published(content: dict[str, torch.Tensor]) -> None:
        prefix = {"gpt_neox": "", "opt": "model."}.get(family, "transformer.")
        for name in list(content):
            content[name.removeprefix(prefix)] = content.pop(name)
        masks = {"gpt2": "h.0.attn.bias", "gpt_neox": "gpt_neox.layers.0.attention.masked_bias"}
        if family in masks:
            content[masks[family]] = torch.ones(1, 1, 8, 8)

    tensors(tmp_path, as_first_published)
    tokens = prompt(9, 1)
    assert relative_error(whole(load(tmp_path), tokens), logits(oracle, tokens)) <= 1e-5


def test_first_published_configs_of_gemma(tmp_path: Path) -> None:
    facts = {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    oracle = write(tmp_path, "gemma3_text", rope_parameters=ropes, **facts)
    gone = ("rope_parameters", "layer_types", "_sliding_window_pattern", "attention_bias")
    edit_config(
        tmp_path, gone, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    tokens = prompt(19, 1)
    assert relative_error(whole(load(tmp_path), tokens), logits(oracle, tokens)) <= 1e-5
    gemma2 = SMALL | {"model_type": "gemma2", "num_hidden_layers": 3}
    spec = read_spec(gemma2, "config.json")[0]
    assert spec.windows == (4096, 0, 4096) and spec.softcap == 50.0 and spec.output_softcap == 30.0


def test_defaults_of_omitted_fields_are_the_family_s() -> None:
    base = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    base |= {"num_attention_heads": 8, "num_hidden_layers": 30}
    mistral, _, _ = read_spec(base | {"model_type": "mistral"}, "config.json")
    assert mistral.kv_heads == 8 and set(mistral.windows) == {4096}
    open_window, _, _ = read_spec(base | {"model_type": "mistral", "sliding_window": None}, "config.json")
    assert set(open_window.windows) == {0}
    qwen = base | {"model_type": "qwen2", "num_attention_heads": 32, "use_sliding_window": True}
    assert read_spec(qwen, "config.json")[0].windows == (0,) * 28 + (4096,) * 2
    assert set(read_spec(qwen | {"use_sliding_window": False}, "config.json")[0].windows) == {0}


def test_head_on_disk_wins_over_the_tie_flag(tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama")
    edit_config(tmp_path, tie_word_embeddings=True)
    tokens = prompt(9, 1)
    assert relative_error(whole(load(tmp_path), tokens), logits(oracle, tokens)) <= 1e-5


def test_generation_defaults(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    model = load(tmp_path)
    assert model.eos_token_ids == (2,) and model.bos_token_id == 1 and model.generation_defaults == {}
    facts = {"eos_token_id": [2, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(facts))
    model = load(tmp_path)
    assert model.eos_token_ids == (2, 5)
    assert model.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(facts | {"do_sample": False}))
    assert load(tmp_path).generation_defaults == {"temperature": 0.0}
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9, "repetition_penalty": 1.1}')
    model = load(tmp_path)
    assert model.eos_token_ids == (2,) and model.bos_token_id == 1
    assert model.generation_defaults == {"max_tokens": 9, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("on_disk", "asked", "kept"),
    [("bfloat16", "auto", "bfloat16"), ("float16", "auto", "float16"), ("float16", "bfloat16", "bfloat16"),
     ("float32", "auto", "float32"), ("float16", "float32", "float32"), ("float32", "bfloat16", "bfloat16"),
     ("bfloat16", "float16", "float16")],
)  # fmt: skip
def test_dtype_of_the_weights(on_disk: str, asked: str, kept: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", dtype=getattr(torch, on_disk))
    model = load(tmp_path, dtype=asked)
    assert describe(str(tmp_path)).dtype.name == on_disk
    assert model.dtype == kept and model.layouts[0][0].dtype == named(kept)
    assert bool(model.notes) == (on_disk == "float16" and kept == "bfloat16")
    tokens = prompt(9, 1)
    error = relative_error(whole(model, tokens), logits(oracle, tokens))
    assert error <= (1e-5 if kept == "float32" else 3e-2)
    assert kept != "bfloat16" or error > 1e-5, "bf16 arithmetic should differ from f32"


def test_options_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", intermediate_size=48)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_model_len": 129}, "128"),
        ({"quantization": "int3"}, "int8, int4"),
        ({"quantization": "int4"}, "model.layers.0.mlp.down_proj.weight"),
    ]
    for options, word in refused:
        with pytest.raises(ConfigError, match=word):
            load(tmp_path, **options)


def test_describe_reads_headers_only(tmp_path: Path) -> None:
    oracle = write(tmp_path, "qwen3", head_dim=16, dtype=torch.bfloat16)
    facts = describe(str(tmp_path))
    assert facts.parameters == sum(p.numel() for p in oracle.parameters())
    assert facts.bytes_on_disk == 2 * facts.parameters
    assert facts.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert facts.scheme == "dense" and facts.spec.family == "qwen3"


def test_dummy_weights_are_the_same_every_time_and_need_no_file(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", head_dim=16, attention_bias=True)
    (tmp_path / "model.safetensors").unlink()
    tokens = prompt(9, 1)
    first, again = (whole(load(tmp_path, load_format="dummy"), tokens) for _ in range(2))
    assert torch.equal(first, again) and bool(torch.isfinite(first).all())
    other = whole(load(tmp_path, load_format="dummy", seed=1), tokens)
    assert not torch.equal(first, other)
    spread = load(tmp_path, load_format="dummy").decoder.embed.table.float().std()
    assert abs(float(spread) - 0.02) < 0.002


def test_progress_and_report_account_for_all_bytes(tmp_path: Path) -> None:
    write(tmp_path, "llama", attention_bias=True)
    seen: list[tuple[int, int, str]] = []
    config = flat_config(model=str(tmp_path))
    model = load_model(config, backend("reference"), lambda *step: seen.append(step))
    total = describe(str(tmp_path)).bytes_on_disk
    assert [what for _, _, what in seen] == ["layer 0", "layer 1", "layer 2", "head"]
    assert seen[-1][0] == total and all(t == total for _, t, _ in seen)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    rope = model.report["rope"][1]
    assert model.weight_bytes - rope == total


def test_an_encoder_decoder_is_refused_for_what_it_is() -> None:
    with pytest.raises(ModelError, match=r"config\.json: model_type: 'bart' is an encoder and a decoder"):
        read_spec({"model_type": "bart", "is_encoder_decoder": True}, "config.json")
