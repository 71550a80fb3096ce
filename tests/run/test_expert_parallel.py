"""Experts divided over ranks: the bits of one rank, engines of several processes, a rank that dies."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_answers import Answer, make_requests, run
from family_formats import FILES, Checkpoint
from group import each, forks
from loaded_folders import made_anew
from lora_adapters import write_adapter
from model_variants import LATENTS as LATENT
from model_variants import MIXTURES, SKEWED
from oracle import BACKENDS, backend, relative_error, write
from paged_model import Paged, prompt
from quire.cli import main
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.engine.client import EngineInfo
from quire.engine.local import LocalEngine
from quire.engine.processes.channel import LocalChannel
from quire.engine.processes.process import ProcessEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from quire.engine.stats import Stats
from quire.model.build import Model, load_model
from quire.model.load.packed_writing import finish_all
from quire.model.net.decoder import Decoder
from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.parallel.experts import ExpertPlan, read_counts, write_counts
from quire.parallel.rank_place import ALONE, RankPlace
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.topology import Topology
from sparse_variants import SPARSE, WHOLE
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def load(folder: Path, ops: Ops, place: RankPlace = ALONE, **options: Any) -> Model:
    return load_model(flat_config(**({"model": str(folder), "dtype": "float32"} | options)), ops, place=place)


def place_of(comm: Comm, axis: str = "expert", redundant: int = 0, counts: Any = ()) -> RankPlace:
    """Of a rank among those along one axis."""
    return RankPlace(Topology(**{axis: comm.world}), comm.rank, {axis: comm}, ExpertPlan(axis, redundant, counts))


def logits(model: Model) -> Tensor:
    return torch.cat([part.clone() for part in Paged(model, [prompt(23, 1), prompt(5, 2)]).run([[9, 5], [14, 0]])])


WITHOUT_EXPERTS = ("minicpm3", "youtu")
LATENTS = {
    name: facts
    for name, facts in LATENT.items()
    if facts[1].get("first_k_dense_replace", 1) < 3 and facts[0] not in WITHOUT_EXPERTS
}
SPARSE_EXPERTS = {
    **{name: SPARSE[name] for name in ("glm_moe_dsa", "dots3_note")},
    "minimax_m3": WHOLE["minimax_m3_short"],
}
VARIANTS = MIXTURES | LATENTS | SPARSE_EXPERTS
FEW = ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "glm4_moe_norms", "phimoe_biases", *[*LATENTS][:1])


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_divided_experts_give_the_bits_of_one_rank(name: str, tmp_path: Path) -> None:
    """With attention whole; beside tensor parallel attention, whose sums are others, 1e-5."""
    family, facts = VARIANTS[name]
    write(tmp_path, family, **facts)
    want = logits(load(tmp_path, backend("cpu")))

    def work(comm: Comm) -> None:
        ops = backend("cpu")
        assert torch.equal(logits(load(tmp_path, ops, place_of(comm))), want)
        if name != "jamba":  # whose scans of channels are not divided
            assert relative_error(logits(load(tmp_path, ops, place_of(comm, "tensor"))), want) <= 1e-5

    assert forks(2, work) == [0, 0]


@pytest.mark.parametrize("world", [3])
def test_three_ranks_and_copies_give_the_same_bits(world: int, tmp_path: Path) -> None:
    """However experts are placed, by counts or without, and with two shares of width of each."""
    write(tmp_path, "mixtral", **MIXTURES["mixtral"][1])
    want = logits(load(tmp_path, backend("cpu")))

    def work(comm: Comm) -> None:
        for redundant, counts in ((0, ()), (1, (SKEWED,) * 3), (9, (SKEWED,) * 3), (16, ())):
            model = load(tmp_path, backend("cpu"), place_of(comm, "expert", redundant, counts))
            assert torch.equal(logits(model), want), (redundant, counts)

    assert forks(world, work) == [0] * world


def test_experts_divided_and_cut(tmp_path: Path) -> None:
    """Four ranks: each has one half of the width of half of the experts."""
    write(tmp_path, "qwen2_moe", **MIXTURES["qwen2_moe"][1] | {"moe_intermediate_size": 32})
    want = logits(load(tmp_path, backend("reference")))
    topology = Topology(expert=2, tensor=2)
    files = {group: shared_memory(comm_bytes(2)) for r in range(4) for group in groups_of(topology, r).values()}

    def work(world: Comm) -> Tensor:
        groups = groups_of(topology, world.rank)
        comms = {axis: SharedComm(files[g], topology.along(world.rank, axis), 2, True) for axis, g in groups.items()}
        return logits(
            load(tmp_path, backend("reference"), RankPlace(topology, world.rank, comms, ExpertPlan("expert")))
        )

    for got in each(4, work):
        assert relative_error(got, want) <= 1e-5


def groups_of(topology: Topology, rank: int) -> dict[str, tuple[int, ...]]:
    return {axis: topology.group(rank, axis) for axis in ("expert", "tensor")}


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "16-bit activations": {"quantization": "int8", "activations": "int16"},
    "nf4": {"quantization": "nf4"}, "mxfp4": {"quantization": "mxfp4"},
}  # fmt: skip


@pytest.mark.slow
def test_every_format_of_experts_can_be_divided(tmp_path: Path) -> None:
    made = Checkpoint("mixtral", tmp_path / "dense")
    folders: dict[str, tuple[Path, dict[str, Any]]] = {
        name: (made.folder, options) for name, options in FORMATS.items()
    }
    for name, (config, convert, _) in FILES.items():
        made.quantized(tmp_path / name, config, convert)
        folders[name] = tmp_path / name, {"dtype": "bfloat16"}
    want = {name: logits(load(folder, backend("cpu"), **options)) for name, (folder, options) in folders.items()}

    def work(comm: Comm) -> None:
        for name, (folder, options) in folders.items():
            model = load(folder, backend("cpu"), place_of(comm, "expert", 1), **options)
            assert torch.equal(logits(model), want[name]), name

    assert forks(2, work) == [0, 0]


def test_adapters_are_beside_divided_experts(tmp_path: Path) -> None:
    oracle = write(tmp_path / "model", "mixtral", **MIXTURES["mixtral"][1])
    folder = write_adapter(tmp_path / "adapter", oracle, ("q_proj", "k_proj", "v_proj", "o_proj"), seed=3)
    options: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"a={folder}",)}

    def adapted(model: Model) -> Tensor:
        assert model.adapters is not None
        model.adapters.rows[:] = 0
        return logits(model)

    whole = load(tmp_path / "model", backend("cpu"), **options)
    plain, want = logits(whole), adapted(whole)
    assert relative_error(plain, want) > 1e-2

    def work(comm: Comm) -> None:
        assert torch.equal(adapted(load(tmp_path / "model", backend("cpu"), place_of(comm), **options)), want)
        tensor = adapted(load(tmp_path / "model", backend("cpu"), place_of(comm, "tensor"), **options))
        assert relative_error(tensor, want) <= 1e-5

    assert forks(2, work) == [0, 0]


def test_each_rank_reads_and_keeps_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are found again while the rank holds the same ones."""
    write(tmp_path / "model", "mixtral", **MIXTURES["mixtral"][1])
    options: dict[str, Any] = {"quantization": "int8", "cache_packed": str(tmp_path / "kept")}
    ranks = [RankPlace(Topology(expert=2), rank, {}, ExpertPlan("expert")) for rank in range(2)]
    whole, *parts = (load(tmp_path / "model", backend("cpu"), place, **options).report for place in (ALONE, *ranks))
    assert all(
        part["expert_down"][1] * 2 == whole["expert_down"][1] and part["q+k+v"] == whole["q+k+v"] for part in parts
    )
    finish_all()
    made = made_anew(monkeypatch)
    for place in (ALONE, *ranks):
        load(tmp_path / "model", backend("cpu"), place, **options)
    assert not made and len(list((tmp_path / "kept").iterdir())) == 3
    load(
        tmp_path / "model",
        backend("cpu"),
        RankPlace(Topology(expert=2), 0, {}, ExpertPlan("expert", 0, (SKEWED,) * 3)),
        **options,
    )
    assert made
    finish_all()


def test_divided_experts_may_come_from_a_file(tmp_path: Path) -> None:
    """As they are chosen, or with their layers; this rank's alone."""
    write(tmp_path / "model", "mixtral", **MIXTURES["mixtral"][1], dtype=torch.bfloat16)
    want = logits(load(tmp_path / "model", backend("cpu"), dtype="bfloat16"))

    def work(comm: Comm) -> None:
        for how, source in (("experts", "ExpertPool"), ("disk", "Streamed")):
            own: dict[str, Any] = {"weight_offload": how, "weight_memory_gib": 0.00042, "dtype": "bfloat16"}
            own["weight_offload_folder"] = str(tmp_path / str(comm.rank))
            model = load(tmp_path / "model", backend("cpu"), place_of(comm), **own)
            assert isinstance(model.decoder, Decoder) and type(model.decoder.source).__name__ == source
            assert torch.equal(logits(model), want)

    assert forks(2, work) == [0, 0]


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose router has two favourites, both in the first half."""
    folder = tmp_path_factory.mktemp("skewed")
    family, facts = MIXTURES["glm4_moe"]
    write(folder, family, **facts | {"max_position_embeddings": 256})
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name][:2] = 4.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def answers(folder: Path, rng: random.Random | None = None, **options: Any) -> tuple[dict[str, bytes], Stats]:
    """What 16 requests gave, and how the engine stood at the end."""
    engine = LocalEngine(
        flat_config(**({"model": str(folder), "device": "cpu", "dtype": "float32", "num_blocks": 512} | options))
    )
    with closing(engine):
        found = {name: answer.bits() for name, answer in run(engine, make_requests(16, 99), rng).items()}
        return found, engine.engine.stats()


@pytest.fixture(scope="module")
def alone(skewed: Path) -> dict[str, bytes]:
    """What one rank says."""
    return answers(skewed)[0]


def test_an_engine_of_ranks_says_what_one_says_under_load(skewed: Path, alone: dict[str, bytes]) -> None:
    """Chunked prompts, preempted sequences, looked-up drafts, recorded steps."""
    found, stats = answers(
        skewed, expert_parallel_size=2, num_blocks=24, block_size=8, max_num_batched_tokens=64,
        speculative_config='{"method": "ngram", "adaptive": false}',
    )  # fmt: skip
    assert found == alone and stats.preemptions and stats.accepted_tokens
    assert len(stats.expert_pairs) == 2 and stats.expert_imbalance > 1.2


@pytest.mark.slow
def test_experts_are_divided_beside_contexts(skewed: Path, alone: dict[str, bytes]) -> None:
    """Four processes: each has half of the keys, and half of the experts."""
    found, stats = answers(skewed, expert_parallel_size=2, context_parallel_size=2)
    assert found == alone and len(stats.expert_pairs) == 2


@pytest.mark.slow
def test_counts_are_kept_and_even_out_the_next_start(skewed: Path, tmp_path: Path) -> None:
    """Beside tensor parallel attention and 8-bit keys: other experts on each rank, more copies, and the same bits."""
    options: dict[str, Any] = {
        "tensor_parallel_size": 2, "enable_expert_parallel": True, "kv_cache_dtype": "int8",
        "expert_load_file": str(tmp_path / "folder/load.json"),
    }  # fmt: skip
    first, before = answers(skewed, **options)
    counts = read_counts(tmp_path / "folder/load.json")
    assert len(counts) == 3 and not any(counts[0]) and all(row[0] == row[1] == max(row) for row in counts[1:])
    second, after = answers(
        skewed, random.Random(2), num_redundant_experts=2, max_num_batched_tokens=64, max_num_seqs=8, **options
    )
    assert second == first and after.expert_imbalance < 0.9 * before.expert_imbalance


def test_inspect_says_what_a_rank_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mixtral", **MIXTURES["mixtral"][1])
    sizes = []
    for flags in (["--expert-parallel-size", "2"], ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
                  ["--expert-parallel-size", "2", "--num-redundant-experts", "3"]):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["quire", "inspect", str(tmp_path), *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr().out
        assert not ended.value.code and f"{6 if 'redundant' in flags[-2] else 4} of 8 in a layer" in out
        found = re.search(r"weights of a rank +about ([0-9.]+) ([KM])", out)
        assert found is not None and ", of 2 ranks" in out
        sizes.append(float(found[1]) * {"K": 1, "M": 1024}[found[2]])
    whole, cut, copied = sizes
    assert cut < whole < copied


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for options, why in (
        ({"enable_expert_parallel": True}, "there is one rank to give experts to"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2, "expert_parallel_size": 2}, "use one of them"),
        ({"num_redundant_experts": 1}, "every rank has all experts"),
        ({"expert_load_file": "x"}, "every rank has all experts"),
        ({"num_redundant_experts": -1, "expert_parallel_size": 2}, "-1 must not be negative"),
        ({"expert_parallel_size": 65}, "must lie in"),
        ({"expert_parallel_size": 16, "tensor_parallel_size": 16}, "more than 64 ranks"),
    ):
        with pytest.raises(ConfigError, match=why):
            flat_config(**({"model": "m"} | options))
    write(tmp_path / "dense", "llama")
    write(tmp_path / "mixtral", "mixtral", **MIXTURES["mixtral"][1])
    place = RankPlace(Topology(expert=2), 0, {}, ExpertPlan("expert"))
    with pytest.raises(ConfigError, match="'llama' models have no experts to divide"):
        load(tmp_path / "dense", backend("reference"), place)
    for plan, size, why in ((ExpertPlan("expert"), 9, "8 experts cannot be divided among 9 ranks"),
                            (ExpertPlan("expert", 9), 2, "2 ranks with all 8 experts have 8 copies")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            load(tmp_path / "mixtral", backend("reference"), RankPlace(Topology(expert=size), 0, {}, plan))
    for text in ("[[1, -2]]", "{}", "[[1,"):
        (tmp_path / "counts").write_text(text)
        with pytest.raises(ConfigError, match="--expert-load-file"):
            read_counts(tmp_path / "counts")
    write_counts(tmp_path / "counts", SKEWED_TWICE := ((1, 2), (3, 4)))
    assert read_counts(tmp_path / "counts") == SKEWED_TWICE and read_counts(tmp_path / "none") == ()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_group_which_is_started_again(skewed: Path, alone: dict[str, bytes]) -> None:
    """Killed in the middle; the group that follows goes on with every request."""
    config = flat_config(model=str(skewed), device="cpu", dtype="float32", num_blocks=512, expert_parallel_size=2)
    engines: list[ProcessEngine] = []

    def start(before: EngineInfo | None, given_up: Callable[[], bool]) -> ProcessEngine:
        engines.append(ProcessEngine(config, None, given_up))
        return engines[-1]

    requests = make_requests(16, 99)
    found = {request.id: Answer([], []) for request in requests}
    with closing(SupervisedEngine(start, RestartPolicy(hang=0), config.scheduler)) as client:
        for request in requests:
            client.submit(request)
        first = children(engines[0])
        for _ in turns(lambda: any(answer.reason is None for answer in found.values()), 2000):
            report = client.poll(0.05)
            for out in report.outputs if report else ():
                found[out.request_id].tokens += out.tokens
                found[out.request_id].logprobs += out.logprobs
                found[out.request_id].reason = out.finish_reason
            if first and any(len(answer.tokens) > 8 for answer in found.values()):
                os.kill(first.pop(), signal.SIGKILL)
        assert len(engines) == 2 and children(engines[1])
    assert {name: answer.bits() for name, answer in found.items()} == alone


def children(engine: ProcessEngine) -> list[int]:
    """The other ranks of an engine's process."""
    assert isinstance(engine.channel, LocalChannel)
    pid = engine.channel.process.pid
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
