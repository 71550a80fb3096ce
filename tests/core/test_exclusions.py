"""Every row of the table of exclusions is refused when an engine starts, and says what the row says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attention_variants import GATED_DENSE
from encoder_models import write_encoder
from gemma_variants import GEMMAS
from head_folders import saved, write_medusa
from hidden_rows import hide_rows
from lora_adapters import LINEARS
from model_variants import LATENTS, MIXTURES, PLAIN_ROPE
from oracle import write
from parallel_pairs import write_gptq
from peft_layouts import Layout
from queueing_engine import MISSING
from quire.cli.models import model_entries
from quire.core.config import flat_config
from quire.core.errors import QuireError
from quire.core.exclusions import features as f
from quire.core.exclusions.exclusion import DIFFERS, Exclusion, Known
from quire.core.exclusions.table import TABLE
from quire.core.machine import memory_file
from quire.core.pooling import Pooling
from quire.engine.local import LocalEngine
from quire.engine.start import start_engine
from quire.features.pooling.edge_pooled_requests import pooling_of
from quire.model.build import Model, load_model
from quire.model.net.decoder import Decoder
from quire.model.offload.shared_host import Shards
from quire.ops.backend import open_backend
from quire.ops.native import load_native
from quire.parallel.experts import ExpertPlan
from quire.parallel.rank_place import RankPlace
from quire.parallel.topology import Topology
from quire.run.rank_group import Ranks
from quire.simulate.design import design_of
from quire.simulate.simulate_options import ClusterOptions
from quire.speculate.medusa import load_medusa
from speculation_methods import TINY
from speech_models import write_speech
from triton_ops import HAS_TRITON
from vision_prompts import write_made

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
ASKED: dict[f.Feature, dict[str, Any]] = {
    f.TENSOR: {"tensor_parallel_size": 2},
    f.ONE_TENSOR_RANK: {"tensor_parallel_size": 1},
    f.STAGES: {"pipeline_parallel_size": 2},
    f.ONE_STAGE: {"pipeline_parallel_size": 1},
    f.MICRO_BATCHES: {"pipeline_micro_batches": 4},
    f.CONTEXT: {"context_parallel_size": 2},
    f.EXPERT_RANKS: {"expert_parallel_size": 2},
    f.WHOLE_EXPERTS: {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    f.UNDIVIDED_EXPERTS: {},
    f.REDUNDANT_EXPERTS: {"num_redundant_experts": 1},
    f.EXPERT_LOAD_FILE: {"expert_load_file": "x"},
    f.SEQUENCE_PARALLEL: {"enable_sequence_parallel": True, "tensor_parallel_size": 2},
    f.RANK_INVARIANT: {"rank_invariant": True},
    f.REPLICAS: {"data_parallel_size": 2},
    f.ONE_REPLICA: {"data_parallel_size": 1},
    f.PREFILL_REPLICAS: {"data_parallel_size": 2, "prefill_replicas": 1, "kv_store": "x"},
    f.HOSTS: {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "127.0.0.1", "cluster_secret_file": "x"},
    f.HOSTS_WITHOUT_RAY: {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret_file": "x"},
    f.RAY: {"distributed_executor_backend": "ray", "cluster_secret_file": "x"},
    f.NO_RAY: {"distributed_executor_backend": "mp"},
    f.RAY_ADDRESS: {"ray_address": "auto"},
    f.NO_MASTER_ADDR: {},
    f.NO_SECRET: {"cluster_secret_file": None},
    f.QUANTIZATION: {"quantization": "int4"},
    f.ACTIVATIONS: {"activations": "int8"},
    f.DUMMY: {"load_format": "dummy"},
    f.PACKED_FOLDER: {"cache_packed": "x"},
    f.LAYERS_ON_DISK: {"weight_offload": "disk"},
    f.EXPERTS_ON_DISK: {"weight_offload": "experts"},
    f.NO_WEIGHT_OFFLOAD: {},
    f.WEIGHT_MEMORY: {"weight_memory_gib": 1.0},
    f.WEIGHT_FOLDER: {"weight_offload_folder": "x"},
    f.CPU_OFFLOAD: {"cpu_offload_gb": 1.0},
    f.FULLY_SHARD: {"fully_shard": True, "data_parallel_size": 2},
    f.LORA: {"enable_lora": True},
    f.LORA_MODULES: {"lora_modules": ("a=x",)},
    f.NO_LORA: {},
    f.KV_FORMAT: {"kv_cache_dtype": "int8"},
    f.NO_PREFIX_CACHE: {"enable_prefix_caching": False},
    f.GPU_SHARE: {"gpu_memory_utilization": 0.5},
    f.KV_STORE: {"kv_store": "x"},
    f.NO_KV_STORE: {"kv_store": None},
    f.KV_OFFLOADING: {"kv_offloading_size": 1.0},
    f.ASYNC: {"async_scheduling": True},
    f.TARGET_ITL: {"target_itl_ms": 50.0},
    f.WHOLE_PROMPTS: {"enable_chunked_prefill": False},
    f.GPU: {"device": "cuda", "ops": MISSING},
    f.NO_GPU: {"device": "cpu"},
    f.REFERENCE_OPS: {"device": "reference"},
    f.GPU_PROCESSES: {"device": "cuda", "tensor_parallel_size": 2},
    f.IN_PROCESS: {},
    f.SEVERAL_MODELS: {},
    f.SIMULATION: {},
}
"""The smallest options that ask for a feature, or for its absence."""
DRAFTS: dict[f.Feature, dict[str, Any]] = {
    f.DRAFTS: {"method": "ngram"},
    f.DRAFT_MODEL: {"method": "draft_model", "model": "x"},
    f.SELF_QUANTIZED: {"method": "self", "quantization": "int4"},
    f.SELF_LAYERS: {"method": "self", "layers": 1},
    f.MEDUSA: {"method": "medusa", "model": "x"},
    f.EAGLE: {"method": "eagle", "model": "x"},
    f.EAGLE3: {"method": "eagle3", "model": "x"},
    f.DFLASH: {"method": "dflash", "model": "x"},
    f.MTP: {"method": "mtp"},
    f.TREES: {"method": "ngram", "topk": 2},
}
ASKED |= {drafts: {"speculative_config": json.dumps(config)} for drafts, config in DRAFTS.items()}
FOLDERS: dict[f.Feature, Callable[[Path], object]] = {
    f.ENCODER: lambda path: write(path, "t5"),
    f.BIDIRECTIONAL: lambda path: write_encoder(path, "bert"),
    f.HEARING: write_speech,
    f.LATENTS: lambda path: write(path, TINY["latents"][0], **TINY["latents"][1]),
    f.BLOCK_INDEXERS: lambda path: write(path, TINY["block indexers"][0], **TINY["block indexers"][1]),
    f.ENTRIES: lambda path: write(path, TINY["entries"][0], **TINY["entries"][1]),
    f.SHARED_INDEXERS: lambda path: write(path, TINY["shared indexers"][0], **TINY["shared indexers"][1]),
    f.CONVOLUTIONS: lambda path: write(path, TINY["convolutions"][0], **TINY["convolutions"][1]),
    f.STATES: lambda path: write(path, MIXTURES["minimax"][0], **MIXTURES["minimax"][1]),
    f.CHANNEL_SCANS: lambda path: write(path, TINY["channel_scans"][0], **TINY["channel_scans"][1]),
    f.SHARED_BLOCKS: lambda path: write(path, TINY["shared_blocks"][0], **TINY["shared_blocks"][1]),
    f.STREAMS: lambda path: write(path, GEMMAS["gemma3n"][0], **GEMMAS["gemma3n"][1]),
    f.TURNS: lambda path: write(path, GATED_DENSE["hrm_text"][0], **GATED_DENSE["hrm_text"][1]),
    f.LAYER_INPUTS: lambda path: write(path, GEMMAS["gemma4_small"][0], **GEMMAS["gemma4_small"][1]),
    f.PASSING: lambda path: write(path, LATENTS["longcat_flash"][0], **LATENTS["longcat_flash"][1]),
    f.UNLIKE_LAYERS: lambda path: write(path, GEMMAS["gemma4"][0], **GEMMAS["gemma4"][1]),
    f.NO_EXPERTS: lambda path: write(path, "llama"),
    f.IMAGES: lambda path: write_made("qwen3_vl", path),
    f.BORROWED: lambda path: write(path, "apertus", **PLAIN_ROPE),
    f.QUANTIZED: write_gptq,
    f.EXPERTS_ON_DISK: lambda path: write(path, "mixtral", num_local_experts=4, num_experts_per_tok=2),
    f.PROJECTED: lambda path: write(path, "opt", ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False),
}
"""A model of each kind."""
ON_A_GPU = {"device": "cuda", "ops": (*MISSING, "linear=reference")}


def options_of(row: Exclusion) -> dict[str, Any]:
    """Of the smallest engine that asks for both."""
    if (row.a, row.b) == (f.CPU_OFFLOAD, f.REFERENCE_OPS):
        return ASKED[row.a] | ON_A_GPU
    return ASKED.get(row.a, {}) | ASKED.get(row.b, {})


def named(row: Exclusion) -> Any:
    return pytest.param(row, id=f"{row.a.flag} x {row.b.flag}".replace(" ", "_"))


def start(row: Exclusion, folder: str) -> object:
    """An engine of the row's example, by the command that it is of."""
    options = {"model": folder, "device": "cpu"} | options_of(row)
    if row.b is f.SEVERAL_MODELS:
        return model_entries(options | {"model": [f"a={folder}"]})
    config = flat_config(**options)
    if row.b is f.SIMULATION:
        return design_of(config, ClusterOptions(), 0)
    if row.b is f.IN_PROCESS and row.a is not f.FULLY_SHARD:
        return LocalEngine(config)
    shares = row.a is f.FULLY_SHARD and row.b is not f.IN_PROCESS
    return start_engine(config, None, Shards(memory_file()) if shares else None)


def says(row: Exclusion, error: QuireError) -> bool:
    """Whether it is the row's refusal; in front of one that is not an option's stands a folder."""
    told = row.message({}, "" if row.a.option else DIFFERS)
    told = f"model 'a': {told}" if row.b is f.SEVERAL_MODELS else told
    return re.fullmatch(".*".join(map(re.escape, told.split(DIFFERS))), error.message) is not None


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of blocks is a folder, which is not to lie in the tree."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[f.Feature], str]:
    made: dict[f.Feature, str] = {}

    def of(feature: f.Feature) -> str:
        if feature not in made:
            path = tmp_path_factory.mktemp("model")
            FOLDERS.get(feature, FOLDERS[f.NO_EXPERTS])(path)
            made[feature] = str(path)
        return made[feature]

    return of


LATE = (f.ADAPTER_TABLES, f.ADAPTER_TOKEN_NORMS, f.HEADS_WITHOUT_OUTPUT, f.VECTORS, f.WINDOWS, f.NOT_SPARSE)
"""What is found when something beside the model is read, or planned: those rows have tests of their own."""
AT_THE_START = [row for row in TABLE if not {row.a, row.b} & {*LATE}]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("row", [named(row) for row in AT_THE_START])
def test_what_excludes_each_other_is_refused_at_the_start(
    row: Exclusion, folders: Callable[[f.Feature], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if f.BORROWED in (row.a, row.b):
        hide_rows(monkeypatch, "apertus")
    on_gpu = options_of(row).get("device") == "cuda"
    if on_gpu and not HAS_TRITON:
        pytest.skip("triton is not installed")
    with pytest.raises(QuireError) as refused:
        start(row, folders(row.b if row.b in FOLDERS else row.a))
    assert says(row, refused.value), refused.value.message
    assert refused.value.param == row.param


def test_every_feature_that_something_asks_for_is_in_the_table_and_no_pair_twice() -> None:
    known = {value for value in vars(f).values() if isinstance(value, f.Feature)}
    assert known == {feature for row in TABLE for feature in (row.a, row.b)}
    pairs = [frozenset((row.a, row.b)) for row in TABLE]
    assert len(pairs) == len({*pairs})


def rows(*features: f.Feature) -> list[Any]:
    return [named(row) for row in TABLE if {row.a, row.b} & {*features}]


@pytest.mark.parametrize("row", rows(f.VECTORS))
def test_a_model_that_gives_vectors_alone_is_refused(row: Exclusion) -> None:
    known = Known(frozenset({row.b})) if row.b in (f.ENCODER, f.BIDIRECTIONAL) else Known()
    model = SimpleNamespace(pooling=Pooling(generates=False), known=known, folder=Path("x"))
    with pytest.raises(QuireError) as refused:
        pooling_of(flat_config(**ASKED.get(row.b, {})), cast(Model, model))
    assert refused.value.message.endswith(f"cannot: {row.told({})[0]}")


@pytest.mark.parametrize("row", rows(f.WINDOWS))
def test_a_draft_model_of_one_rank_is_refused_beside_windows(row: Exclusion) -> None:
    ranks, kv = SimpleNamespace(_staged=row.a is f.DRAFTS_BESIDE_STAGES), SimpleNamespace(max_model_len=64)
    with pytest.raises(QuireError) as refused:
        Ranks.allocate(cast(Ranks, ranks), cast(Any, kv), cast(Any, None), True, [16])
    assert says(row, refused.value) and refused.value.param == row.param


def test_who_asks_for_a_draft_model_of_one_rank() -> None:
    drafts = {"speculative_model": "x", "speculative_draft_tensor_parallel_size": 1}
    assert f.DRAFTS_BESIDE_STAGES in flat_config(**ASKED[f.STAGES] | ASKED[f.DRAFT_MODEL]).features
    assert f.DRAFTS_ON_ONE_RANK in flat_config(**ASKED[f.TENSOR] | drafts).features
    alone = flat_config(**drafts).features | flat_config(**ASKED[f.TENSOR] | ASKED[f.DRAFT_MODEL]).features
    assert not {f.DRAFTS_BESIDE_STAGES, f.DRAFTS_ON_ONE_RANK} & alone


PLACES = {f.STAGES: Topology(pipeline=2), f.CONTEXT: Topology(context=2), f.EXPERT_RANKS: Topology(expert=2)}


@pytest.mark.parametrize("row", rows(f.ADAPTER_TABLES))
def test_adapters_that_only_some_ranks_take_are_refused(row: Exclusion, tmp_path: Path) -> None:
    sparse = {"num_local_experts": 4, "num_experts_per_tok": 2}
    family, facts = ("mixtral", sparse) if row.b is f.EXPERT_RANKS else ("llama", {})
    layout = Layout(write(tmp_path / "model", family, **facts), 1)
    folder = layout.low_rank(*LINEARS[:1], dora=True).write(tmp_path / "dora")
    own = {"enable_lora": True, "lora_modules": (f"a={folder}",), "model": str(tmp_path / "model"), "device": "cpu"}
    plan = ExpertPlan("expert") if row.b is f.EXPERT_RANKS else ExpertPlan()
    config = flat_config(**own | ASKED[row.b])
    with pytest.raises(QuireError) as refused:
        load_model(config, open_backend(config.device), place=RankPlace(PLACES[row.b], 0, {}, plan))
    assert says(row, refused.value), refused.value.message


def test_magnitudes_of_the_table_of_tokens_need_one_rank(tmp_path: Path) -> None:
    [row] = (row for row in TABLE if row.b is f.ADAPTER_TOKEN_NORMS)
    layout = Layout(write(tmp_path / "model", "llama"), 1)
    folder = layout.low_rank("embed_tokens", dora=True).write(tmp_path / "dora")
    own = {"enable_lora": True, "lora_modules": (f"a={folder}",), "model": str(tmp_path / "model"), "device": "cpu"}
    config = flat_config(**own | ASKED[f.TENSOR])
    with pytest.raises(QuireError) as refused:
        load_model(config, open_backend(config.device), place=RankPlace(Topology(tensor=2), 0))
    assert says(row, refused.value) and refused.value.param == row.param, refused.value.message


def test_heads_without_a_matrix_to_logits_need_one_rank(tmp_path: Path) -> None:
    [row] = (row for row in TABLE if row.a is f.HEADS_WITHOUT_OUTPUT)
    folder = write_medusa(tmp_path / "heads", 64, 99, own=False)
    config = json.loads((folder / "config.json").read_text()) | {"original_lm_head": True}
    saved(folder, config, {"medusa_heads.blocks.0.layers.0.weight": torch.zeros(64, 64)})
    spec = SimpleNamespace(hidden=64, vocab_size=99)
    decoder = object.__new__(Decoder)
    object.__setattr__(decoder, "head", None)
    target = SimpleNamespace(spec=spec, decoder=decoder, name="x", dtype="float32")
    with pytest.raises(QuireError) as refused:
        load_medusa(str(folder), cast(Model, target), open_backend(flat_config(device="cpu").device))
    assert says(row, refused.value), refused.value.message


def test_what_no_row_says_is_not_refused() -> None:
    assert flat_config(**ASKED[f.STAGES] | ASKED[f.TENSOR] | ASKED[f.LORA] | ASKED[f.DRAFTS]).parallel.ranks == 4
