"""Recurrent states divided over ranks: by heads, by layers, beside experts; what cannot be is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import Answer, engine_of
from model_variants import MIXTURES
from often import one_of
from oracle import BACKENDS, write
from quire.core.errors import ConfigError
from speculation_methods import METHODS, TINY, answers, requests_of, write_words
from ways_to_serve import differing

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
REQUESTS = [r for r in requests_of(99, "") if r.params.prompt_logprobs is None][:7]
FULL, LINEAR = "full_attention", "linear_attention"
LAYERS = {"mixed": [LINEAR, FULL] * 2, "outside": [FULL, LINEAR, LINEAR, FULL], "inside": [LINEAR, FULL, FULL, LINEAR]}
WAYS: dict[str, dict[str, Any]] = {
    "few blocks and slots": {"num_blocks": 100, "block_size": 4, "num_state_slots": 5, "max_num_seqs": 4},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "blocks of 1": {"block_size": 1, "num_blocks": 2048},
    "ngram": {"speculative_config": json.dumps(METHODS["ngram"] | {"adaptive": False})},
    "each op by itself": {"enforce_eager": True},
}


def folder_of(path: Path, layers: str) -> Path:
    """A model in f32 with so many layers of each kind, and a tokenizer of 99 words."""
    family, facts = TINY["states"]
    write(path, family, **facts | {"layer_types": LAYERS[layers], "max_position_embeddings": 256}, dtype=torch.float32)
    return write_words(path, 99)


def found(folder: Path, again: bool = False, **options: Any) -> dict[str, list[Answer]]:
    """Answers of all requests, or those to the same prompts asked `again`."""
    options = {"model": str(folder), "threads": 1, "max_model_len": 128} | options
    with closing(engine_of(**options)) as engine:
        first = answers(engine, REQUESTS)
        return answers(engine, REQUESTS) if again else first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("states"), "mixed")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[Answer]]:
    """What two ranks that share matrices give without a prefix cache."""
    return found(folder, tensor_parallel_size=2, enable_prefix_caching=False)


def test_two_ranks_that_share_heads_say_what_one_says(folder: Path, two: dict[str, list[Answer]]) -> None:
    one = found(folder)
    assert {name: [row.tokens for row in rows] for name, rows in two.items()} == {
        name: [row.tokens for row in rows] for name, rows in one.items()
    }


def test_hits_of_ranks_change_no_bit(folder: Path, two: dict[str, list[Answer]]) -> None:
    assert not differing(found(folder, again=True, tensor_parallel_size=2, state_interval=16), two)


@pytest.mark.parametrize("way", one_of(5, WAYS))
def test_no_way_to_serve_changes_a_bit_of_ranks(way: str, folder: Path, two: dict[str, list[Answer]]) -> None:
    assert not differing(found(folder, tensor_parallel_size=2, **WAYS[way]), two)


@pytest.mark.parametrize(
    ("layers", "split"),
    [
        ("outside", "1,3"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("mixed", "2,2"), ("mixed", "3,1"), ("outside", "3,1"), ("inside", "1,3"), ("inside", "3,1"))),
    ],
)  # fmt: skip
def test_stages_give_the_bits_of_the_whole_also_those_without_a_state(layers: str, split: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, layers)
    stages = {"pipeline_parallel_size": 2, "pipeline_layers": split}
    assert not differing(found(folder, **stages, **WAYS["few blocks and slots"]), found(folder))


@pytest.mark.parametrize("split", ["1,4", "3,2"])
def test_stages_that_use_one_block_give_the_bits_of_the_whole(split: str, tmp_path: Path) -> None:
    family, facts = TINY["shared_blocks"]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.float32)
    write_words(tmp_path, 99)
    stages = WAYS["few blocks and slots"] | {"num_blocks": 200, "pipeline_parallel_size": 2, "pipeline_layers": split}
    assert not differing(found(tmp_path, **stages), found(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size"])
def test_states_beside_experts(way: str, tmp_path: Path) -> None:
    family, facts = MIXTURES["qwen3_next"]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.float32)
    write_words(tmp_path, 99)
    one, two = found(tmp_path), found(tmp_path, **{way: 2})
    assert {name: [row.tokens for row in rows] for name, rows in two.items()} == {
        name: [row.tokens for row in rows] for name, rows in one.items()
    }


def test_what_states_do_not_go_with_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a convolution reads the rows before each of its own"):
        found(folder, context_parallel_size=2)
    with pytest.raises(ConfigError, match="cannot be split over --tensor-parallel-size 4"):
        found(folder, tensor_parallel_size=4)
