"""Models beside the target that draft by its keys, values and hidden rows: transformers' numbers, and the same bits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from assistants import KINDS, asked, write_assistant, write_pair
from engine_answers import Answer, engine_of, run
from made_up_tower import VOCAB, Shown, image_request, sighted
from mtp_drafts import IN_CHUNKS, check_logits
from oracle import BACKENDS, edit_config
from quire.cli.app import app
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.model.spec import Sight
from quire.ops.choice import choose
from quire.plan.needs import drafting_weights, needs
from speculation_methods import GROWN, answers, requests_of
from ways_to_serve import differing

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def engine_with(folder: Path, more: dict[str, Any] | None = None, **options: Any) -> Any:
    """The target with the assistant beside it, which always drafts."""
    spoken = json.dumps(asked(folder, **more or {}))
    return engine_of(model=str(folder / "target"), speculative_config=spoken, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Over a prompt in chunks, behind windows, after drafts that were kept and lost."""
    pair = write_pair(tmp_path, kind)
    check_logits(engine_with(tmp_path, **IN_CHUNKS).engine, pair.logits, pair.target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in made.items():
        write_pair(path, kind, torch.bfloat16)
    return made


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "block_1": {"block_size": 1, "num_blocks": 4096},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "lora": {"enable_lora": True},
    "two_ranks": {"tensor_parallel_size": 2, "threads": 1},
    "sequence": {"tensor_parallel_size": 2, "enable_sequence_parallel": True, "threads": 1},
}
"""What runs beside it: options of the engine."""
DRAFTS: dict[str, dict[str, Any]] = {
    "three": {},
    "adaptive": {"adaptive": True},
    "eight": {"num_speculative_tokens": 8},
    "tree": GROWN,
    "static tree": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
}
BLOCKS = {"gemma4": 56, "gemma4_small": 30, "gemma4_keys_as_values": 44}
"""Blocks that a few sequences fill, of targets whose layers need fewer than others'."""
CASES = [(kind, feature, drafts) for kind in KINDS for feature in FEATURES for drafts in DRAFTS]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("kind", "feature", "drafts"), CASES)
def test_the_bits_are_those_of_plain_decoding(kind: str, feature: str, drafts: str, folders: dict[str, Path]) -> None:
    options, small = dict(FEATURES[feature]), kind == "gemma4_small"
    if small and feature in ("sequence", "int8"):
        pytest.skip("per-layer embeddings need all rows of a step, and have fewer columns here than a group")
    if feature == "preempted" and kind == "gemma4_unified":
        pytest.skip("its layers are those of gemma4_keys_as_values, and its answers end before blocks are full")
    if feature == "preempted":
        options["num_blocks"] = BLOCKS.get(kind, 64)
    requests = requests_of(99, "")
    want = answers(engine_of(model=str(folders[kind] / "target"), **options), requests)
    local = engine_with(folders[kind], DRAFTS[drafts], **options)
    assert not differing(answers(local, requests), want)
    engine = local.engine
    if drafts != "adaptive":
        assert engine.speculator.totals.tokens > 0
    if feature == "preempted":
        assert engine.scheduler.preemptions > 0
    local.close()


def test_ranks_draft_the_same_tokens(folders: dict[str, Path]) -> None:
    found = []
    for ranks in (1, 2):
        local = engine_with(folders["gemma4"], dtype="float32", tensor_parallel_size=ranks, threads=1)
        given = answers(local, requests_of(99, "")[:4])
        totals = local.engine.speculator.totals
        found.append(({name: [row.tokens for row in rows] for name, rows in given.items()}, totals.tokens))
        local.close()
    assert found[0] == found[1]


PROMPTS: dict[str, list[Any]] = {
    "one": [[*range(5, 10)], Shown(1, 3, 4), [*range(20, 26)]],
    "first and last": [Shown(4, 2, 5), [11, 12, 13, 14], Shown(5, 3, 3)],
    "late": [[*range(30, 60)], Shown(1, 3, 4), [7, 8, 9]],
    "none": [[*range(40, 59)]],
}


@pytest.mark.parametrize("mutual", [False, True])
def test_prompts_with_images_are_drafted_for(mutual: bool, folders: dict[str, Path]) -> None:
    """Rows of images are read as the target kept them: nothing is to be computed for them."""
    requests = [image_request(name, parts, seed=i, max_tokens=24) for i, (name, parts) in enumerate(PROMPTS.items())]
    target, sight = folders["gemma4"] / "target", Sight(mutual=mutual)
    assert VOCAB == 99
    alone: dict[str, Answer] = {}
    with sighted(target, sight, enable_prefix_caching=False) as (engine, _):
        for each in requests:
            alone |= run(engine, [each])
    spoken = json.dumps(asked(folders["gemma4"]))
    for options in ({}, {"max_num_batched_tokens": 32, "max_num_seqs": 7, "num_blocks": 60}):
        with sighted(target, sight, speculative_config=spoken, **options) as (engine, _):
            for _ in range(2):
                got = run(engine, requests, random.Random(3))
                assert [name for name in got if got[name].bits() != alone[name].bits()] == []
            assert engine.engine.stats().draft_tokens > 0 and engine.engine.stats().used_blocks == 0


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_small"])
def test_what_is_planned_is_taken(kind: str, folders: dict[str, Path]) -> None:
    target = str(folders[kind] / "target")
    options: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 64,
        "speculative_config": json.dumps(asked(folders[kind])),
    }
    config = flat_config(model=target, device="cpu", **options)
    engine = engine_of(model=target, **options).engine
    taken = engine.speculator.proposer.weight_bytes  # type: ignore[union-attr]
    assert drafting_weights(config, describe(target), None, choose(config.device)) == pytest.approx(taken, rel=0.05)
    assert needs(config).shape.block_bytes == engine.memory_plan.kv.block_bytes
    plain = engine_of(model=target, num_blocks=64, max_model_len=64).engine
    assert engine.memory_plan.kv.block_bytes == plain.memory_plan.kv.block_bytes, "it keeps nothing itself"


def test_inspect_says_who_drafts(folders: dict[str, Path]) -> None:
    spoken = json.dumps(asked(folders["gemma4"]))
    words = ["inspect", "--model", str(folders["gemma4"] / "target"), "--speculative-config", spoken]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "assistant" in shown.output and "weights that draft" in shown.output


def test_an_assistant_does_not_run_alone(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="does not run alone: it drafts for another model: start that with --spec"):
        engine_of(model=str(folders["gemma4"] / "assistant"))


def test_assistants_of_other_targets_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "gemma4")

    def refused(reason: str) -> None:
        with pytest.raises(ConfigError, match=f"method mtp: .*{reason}"):
            engine_with(tmp_path)

    folder = tmp_path / "assistant"
    write_assistant(folder, "gemma4", backbone_hidden_size=96)
    refused("backbone_hidden_size is 96, that of target is 64")
    write_assistant(folder, "gemma4", text_config={"sliding_window": 9})
    refused("layer 0 has a window of 9, and target has no such layer to read")
    write_assistant(folder, "gemma4", text_config={"global_head_dim": 64})
    refused("layer 2 reads 2 heads of 64 numbers, and layer 3 of target keeps 2 of 32")
    write_assistant(folder, "gemma4", text_config={"vocab_size": 100})
    refused("vocab_size is 100, that of target is 99")
    write_assistant(folder, "gemma4")
    edit_config(folder, model_type="llama")
    refused("'llama' is no model that drafts by the method mtp; known: gemma4_assistant")


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "gemma4_unified")
    path = tmp_path / "assistant" / "model.safetensors"
    tensors = load_file(path)
    order = tensors["masked_embedding.token_ordering"].clone()
    order[0] = order[1]
    save_file(tensors | {"masked_embedding.token_ordering": order}, path)
    with pytest.raises(ConfigError, match="token_ordering does not name each of 99 tokens once"):
        engine_with(tmp_path)
    save_file({name: t for name, t in tensors.items() if name != "pre_projection.weight"}, path)
    with pytest.raises(ConfigError, match=r"missing tensors: pre_projection\.weight"):
        engine_with(tmp_path)
    save_file(tensors | {"more.weight": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"no role of 'gemma4_unified_assistant' takes: more\.weight"):
        engine_with(tmp_path)
