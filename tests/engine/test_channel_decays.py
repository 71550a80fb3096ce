"""The delta rule with a decay for each channel beside latent attention: drafts of a layer, formats, ranks and refusals.

That no way to serve changes a bit of an answer is shown in `test_recurrent_states.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_answers import engine_of
from head_folders import write_eagle
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.ops.native import load_native
from speculation_methods import answers, requests_of
from turns import reports
from ways_to_serve import answers_alone, differing, written

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("channels"), "decays of channels")


def test_a_layer_that_drafts_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, "eagle3", 64, 99, 49)
    asked = {"method": "eagle3", "model": str(tmp_path), "adaptive": False}
    engine = engine_of(model=str(folder), speculative_config=json.dumps(asked))
    assert not differing(answers(engine, requests_of(99, "")), answers_alone(folder))


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"tensor_parallel_size": 2}, {"dtype": "float32"}], ids=str
)
def test_engines_of_other_kinds_serve(folder: Path, options: dict[str, Any]) -> None:
    """In another format or on two ranks a request has the same bits alone as beside others."""
    requests = requests_of(99, "")[:6]
    together = answers(engine_of(model=str(folder), **options), requests)
    single = engine_of(model=str(folder), enable_prefix_caching=False, **options)
    assert not differing(together, {r.id: answers(single, [r])[r.id] for r in requests})


@pytest.mark.parametrize("budget", [16, 512])
def test_a_long_sequence_keeps_the_last_inputs_of_convolutions_beside_all_latents(folder: Path, budget: int) -> None:
    engine = engine_of(model=str(folder), block_size=4, num_blocks=1024, max_num_batched_tokens=budget, max_num_seqs=2)
    kv = engine.engine.kv
    assert kv.groups.windows == (0, 4, 4) and [len(layers) for layers in kv.groups.layers] == [2, 1, 1]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(Request(id="long", prompt=tuple(range(3, 93)) * 2, params=params, seed=0, arrival=0.0))
    longest = 0
    for report in reports(engine):
        for seq in engine.engine.scheduler.running:
            latents, *inputs = ([block for block in table if block >= 0] for table in seq.kv.blocks)
            assert len(latents) == kv.sizes.entries(seq.computed) and all(1 <= len(held) <= 2 for held in inputs)
            assert report.stats.used_blocks == len(latents) + sum(map(len, inputs))
            longest = max(longest, len(latents))
    assert longest == 55


def test_formats_of_latents_and_other_scores_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="latents are kept in bf16 or f32"):
        engine_of(model=str(folder), kv_cache_dtype="int8")
