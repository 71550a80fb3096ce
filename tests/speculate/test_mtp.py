"""The layer for multi-token prediction in a model's own files: what it drafts, by its formula; files without one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from engine_answers import engine_of
from mixture_variants import NEWER
from mtp_drafts import ALWAYS, check_drafts
from mtp_models import WITH_MTP, write_mtp
from oracle import BACKENDS, write
from quire.cli.app import app
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.engine.shown_facts import slots_line
from quire.model.describe import describe, open_model
from quire.model.own_drafts import with_own_drafts
from quire.ops.choice import choose
from quire.plan.needs import drafting_weights, needs
from quire.speculate.eagle_drafter import EagleDrafter
from speculation_methods import answers, requests_of
from ways_to_serve import differing

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", WITH_MTP)
def test_the_logits_are_those_of_the_formula(kind: str, tmp_path: Path) -> None:
    check_drafts(write_mtp(tmp_path, kind), tmp_path)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"block_size": 4, "num_blocks": 32, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "block_1": {"block_size": 1, "num_blocks": 4096},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "snapshots": {"num_state_slots": 40, "state_interval": 8},
    "tokens_8": {"tokens": 8},
}
"""What runs beside it: options of the engine, or `tokens` of a draft."""
BLOCKS = {"mimo_v2_flash": 64, "qwen3_next": 42}
"""Of pools that hold the longest request beside its drafts, and not all requests."""
CASES = [(kind, feature) for kind in WITH_MTP for feature in FEATURES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in WITH_MTP}
    for kind, path in made.items():
        write_mtp(path, kind, torch.bfloat16)
    return {kind: str(path) for kind, path in made.items()}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("kind", "feature"), CASES)
def test_the_bits_are_those_of_plain_decoding(kind: str, feature: str, adaptive: bool, folders: dict[str, str]) -> None:
    options = {"model": folders[kind]} | FEATURES[feature]
    if "kv_lora_rank" in WITH_MTP[kind][1] and feature in ("kv_int8", "snapshots"):
        pytest.skip("latents have no such format, and this model no states")
    if kind == "exaone_moe" and feature == "preempted":
        pytest.skip("with and without the layer, a pool that holds the longest request preempts nobody")
    if feature == "preempted" and {"layer_types", "hybrid_override_pattern"} & {*WITH_MTP[kind][1]}:
        options["num_blocks"] = BLOCKS.get(kind, 48)  # there are several block tables
    asked = {"method": "mtp", "adaptive": adaptive, "num_speculative_tokens": options.pop("tokens", 3)}
    requests = requests_of(99, "")
    want = answers(engine_of(**options, speculative_config='{"method": "none"}'), requests)
    engine = engine_of(**options, speculative_config=json.dumps(asked))
    assert not differing(answers(engine, requests), want)
    assert engine.engine.speculator is not None
    if not adaptive:
        assert engine.engine.speculator.totals.tokens > 0
    if feature == "preempted":
        assert engine.engine.scheduler.preemptions > 0


def test_a_model_without_the_layer_refuses_the_method(tmp_path: Path) -> None:
    write_mtp(tmp_path, "qwen3_5")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if not name.startswith("mtp.")}, str(path))
    with pytest.raises(ConfigError, match=r"method mtp: .*its files have no such layer; use ngram"):
        engine_of(model=str(tmp_path), speculative_config=ALWAYS)
    save_file({name: t for name, t in tensors.items() if name != "mtp.norm.weight"}, str(path))
    with pytest.raises(ConfigError, match=r"missing tensors: mtp\.norm\.weight"):
        engine_of(model=str(tmp_path), speculative_config=ALWAYS)
    assert engine_of(model=str(tmp_path)).engine.speculator is None, "the model alone serves"


def test_layers_that_no_family_reads_are_told(tmp_path: Path) -> None:
    family, facts = NEWER["mellum"]
    write(tmp_path, family, **facts)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {f"mtp.layers.0.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm")}, path)
    told = "layers for multi-token prediction (2 tensors) are left out: those of 'mellum' do not draft"
    assert told in describe(str(tmp_path)).notes
    with pytest.raises(ConfigError, match=re.escape(f"method mtp: {tmp_path.name}: {told}; use ngram")):
        engine_of(model=str(tmp_path), speculative_config=ALWAYS)


def test_the_layer_drafts_where_nothing_is_asked(tmp_path: Path) -> None:
    write_mtp(tmp_path, "qwen3_5", torch.bfloat16)
    options = {"model": str(tmp_path)}
    local = engine_of(**options)
    engine = local.engine
    assert engine.speculator is not None and isinstance(engine.speculator.proposer, EagleDrafter)
    assert "speculation by mtp, 3 tokens at most" in slots_line(flat_config(**options), local.info.drafts)
    assert engine_of(**options, speculative_config='{"method": "none"}').engine.speculator is None
    assert engine_of(**options, pipeline_parallel_size=1, enable_lora=True).engine.speculator is not None
    with pytest.raises(ConfigError, match="none stands alone"):
        engine_of(**options, speculative_config='{"method": "none", "adaptive": false}')


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", WITH_MTP)
@pytest.mark.parametrize("options", [{}, {"dtype": "float32", "enable_lora": True}], ids=["bf16", "f32"])
def test_what_is_planned_is_taken(kind: str, options: dict[str, Any], folders: dict[str, str]) -> None:
    config = flat_config(model=folders[kind], device="cpu", num_blocks=64, max_model_len=64, **options)
    found, choice = describe(folders[kind]), choose(config.device)
    own = with_own_drafts(config, found)
    engine = engine_of(model=folders[kind], num_blocks=64, max_model_len=64, **options).engine
    assert engine.speculator is not None
    taken = engine.speculator.proposer.weight_bytes
    assert drafting_weights(own, found, None, choice) == pytest.approx(taken, rel=0.02)
    assert needs(config).shape.block_bytes == engine.memory_plan.kv.block_bytes
    assert needs(config).weights == pytest.approx(taken + engine.executor.model.weight_bytes, rel=0.02)


def test_inspect_says_who_drafts(folders: dict[str, str]) -> None:
    shown = CliRunner().invoke(app, ["inspect", "--model", folders["glm4_moe"]])
    assert shown.exit_code == 0, shown.output
    assert "the model's own layer for it" in shown.output and "weights that draft" in shown.output
    off = CliRunner().invoke(
        app, ["inspect", "--model", folders["glm4_moe"], "--speculative-config", '{"method": "none"}']
    )
    assert off.exit_code == 0 and "drafts by" not in off.output


def test_tensors_of_the_layer_are_none_of_the_model(folders: dict[str, str]) -> None:
    for kind, folder in folders.items():
        opened = open_model(folder)
        assert opened.mtp is not None and opened.mtp.spec.layers == 1, kind
        assert not opened.source.infos.keys() & opened.mtp.source.infos.keys()
        claimed = {name for parts in opened.mtp.claim.parts.values() for name in parts.values()}
        left = opened.mtp.source.infos.keys() - claimed
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        assert all(name.endswith(copies) for name in left), kind
