"""Experts divided over ranks: who holds which, the bits of one rank, engines of several processes, a rank that dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_formats import FILES, Checkpoint
from group import each, forks
from oracle import BACKENDS, backend, relative_error, write
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.engine.client import EngineInfo, Stats
from quire.engine.local import LocalEngine
from quire.engine.process import ProcessEngine
from quire.engine.supervised import Patience, SupervisedEngine
from quire.model.build import Model, load_model
from quire.ops.backend import Ops
from quire.ops.cases import random_weight
from quire.ops.moe import Between, random_choices
from quire.parallel.comm import Comm
from quire.parallel.experts import ExpertPlan, place_experts, read_counts, write_counts
from quire.parallel.pairs import PairDivider, row_parts
from quire.parallel.place import ALONE, Place
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.topology import Topology
from test_bit_equality import Answer, make_requests, run
from test_lora import write_adapter
from test_mixtures import VARIANTS as MIXTURES
from test_mla import VARIANTS as LATENT
from test_model import Paged, prompt
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
SKEWED = (90, 1, 50, 3, 2, 40, 1, 1)
"""How often eight experts are used."""


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("redundant", [0, 1, 3, 8])
def test_every_expert_has_a_home_and_every_rank_as_many(world: int, redundant: int) -> None:
    redundant = min(redundant, 8 * (world - 1))
    for counts in ((0,) * 8, SKEWED, tuple(reversed(SKEWED)), (0, 0, 0, 0, 0, 0, 0, 9)):
        held = place_experts(counts, world, redundant)
        assert sorted({e for own in held for e in own}) == list(range(8))
        assert all(len(set(own)) == len(own) and list(own) == sorted(own) for own in held)
        sizes = [len(own) for own in held]
        assert sum(sizes) == 8 + redundant and max(sizes) - min(sizes) <= 1


def test_what_is_used_most_is_held_twice_and_work_is_even() -> None:
    assert place_experts((0,) * 8, 2, 0) == ((0, 1, 2, 3), (4, 5, 6, 7))

    def load(held: tuple[tuple[int, ...], ...]) -> float:
        """Of the rank with most, over the mean: pairs of experts that several hold go where least is to do."""
        alone = [sum(SKEWED[e] for e in own if sum(e in other for other in held) == 1) for own in held]
        mean = sum(SKEWED) / len(held)
        return max(*alone, mean) / mean

    plain, placed, copied = place_experts((0,) * 8, 2, 0), place_experts(SKEWED, 2, 0), place_experts(SKEWED, 2, 2)
    assert all(0 in own and 2 in own for own in copied)
    assert load(plain) > 1.5 and load(placed) < 1.05 and load(copied) == 1.0


def tables(held: tuple[tuple[int, ...], ...], experts: int) -> list[PairDivider]:
    """What each rank has."""
    return [PairDivider(held, r, torch.zeros(experts + len(held) + 1, dtype=torch.int64)) for r in range(len(held))]


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize(("world", "redundant"), [(2, 0), (2, 3), (3, 2), (5, 9)])
def test_pairs_come_once_and_outputs_find_their_rows(rows: int, world: int, redundant: int) -> None:
    """Rows travel as `all_to_all` would carry them: each choice of a row is where `places` says, once."""
    ops, g = backend("reference"), torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(rows)]).int()
    held, parts = place_experts(SKEWED, world, redundant), row_parts(rows, world)
    dividers = tables(held, 8)
    found = [divide(ops, ids) for divide in dividers]
    mail: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for rank, pairs in enumerate(found):
        offsets, used = pairs.offsets[0].tolist(), int(pairs.offsets[0, -1])
        expert_of = [e for e, a, b in zip(held[rank], offsets[:-1], offsets[1:], strict=True) for _ in range(a, b)]
        sent = [(int(pairs.tokens[i]), expert_of[i]) for i in pairs.order[:used, 0].tolist()]
        assert int(pairs.sends.sum()) == used == len(set(sent)) and max(sent, default=(0, 0))[0] < rows
        for to, part in enumerate(torch.arange(used).split(pairs.sends.tolist())):
            mail[to] += [sent[i] for i in part.tolist()]
    first = 0
    for rank, pairs in enumerate(found):
        want = [[(first + r, int(e)) for e in ids[first + r]] for r in range(parts[rank])]
        assert [[mail[rank][i] for i in row] for row in pairs.places.tolist()] == want
        first += parts[rank]
    counted = dividers[0].counted.tolist()
    assert counted[:8] == torch.bincount(ids.flatten().long(), minlength=8).tolist()
    assert counted[8 : 8 + world] == [int(p.offsets[0, -1]) for p in found] and counted[-1] == max(counted[8:-1])
    assert all(divide.counted.tolist() == counted for divide in dividers)


def test_an_expert_is_read_by_a_second_rank_only_for_many_pairs() -> None:
    ops, everywhere = backend("reference"), ((0, 1), (0, 1))
    for rows, shares in ((1, {1}), (16, {16}), (32, {16}), (100, {48, 52})):
        loads = {int(d(ops, torch.zeros(rows, 1, dtype=torch.int32)).offsets[0, -1]) for d in tables(everywhere, 2)}
        assert loads - {0} == shares


def test_what_cannot_be_divided_is_refused() -> None:
    ops, divide = backend("cpu"), tables(((0, 1), (2,)), 3)[0]
    for ids in (torch.tensor([[3]]), torch.tensor([[-1]])):
        with pytest.raises(ValueError, match="there is no such expert"):
            divide(ops, ids.int())
    with pytest.raises(ValueError, match="expert 1 is held by no rank"):
        tables(((0,), (2,)), 3)


@pytest.mark.parametrize("used", [0, 1, 40, 300])
def test_experts_compute_as_many_pairs_as_there_are(used: int) -> None:
    """Fewer than there is room for; the others are not looked at."""
    ops, g = backend("cpu"), torch.Generator().manual_seed(used)
    gate_up, down = (
        ops.group(ops.pack(random_weight(g, "bf16", 4 * n, k, 0)), 4, n, None) for n, k in ((64, 32), (48, 32))
    )
    x = torch.randn(350, 32, generator=g)
    tokens, places, offsets, weights = random_choices(g, 350, 1, 4)
    row_of = torch.empty(350, dtype=torch.int64)
    row_of[places[:, 0].long()] = torch.arange(350)
    want = ops.expert_mlp(x, gate_up, down, Between("silu"), (tokens, places, offsets, weights))[row_of[:used]].clone()

    def room(part: Tensor) -> Tensor:
        return torch.cat((part, torch.full((350 - used, 1), 9999, dtype=part.dtype)))

    some = (
        room(tokens[:used]),
        room(torch.arange(used).int()[:, None]),
        offsets.clamp(max=used),
        room(weights[row_of[:used]]),
    )
    assert torch.equal(ops.expert_mlp(x, gate_up, down, Between("silu"), some)[:used], want)


def load(folder: Path, ops: Ops, place: Place = ALONE, **options: Any) -> Model:
    return load_model(flat_config(**({"model": str(folder), "dtype": "float32"} | options)), ops, place=place)


def place_of(comm: Comm, axis: str = "expert", redundant: int = 0, counts: Any = ()) -> Place:
    """Of a rank among those along one axis."""
    return Place(Topology(**{axis: comm.world}), comm.rank, {axis: comm}, ExpertPlan(axis, redundant, counts))


def logits(model: Model) -> Tensor:
    return torch.cat([part.clone() for part in Paged(model, [prompt(23, 1), prompt(5, 2)]).run([[9, 5], [14, 0]])])


LATENTS = {name: facts for name, facts in LATENT.items() if "n_routed_experts" in facts[1]}
VARIANTS = MIXTURES | LATENTS
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
        return logits(load(tmp_path, backend("reference"), Place(topology, world.rank, comms, ExpertPlan("expert"))))

    for got in each(4, work):
        assert relative_error(got, want) <= 1e-5


def groups_of(topology: Topology, rank: int) -> dict[str, tuple[int, ...]]:
    return {axis: topology.group(rank, axis) for axis in ("expert", "tensor")}


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "16-bit activations": {"quantization": "int8", "activations": "int16"}, "fp8": {"quantization": "fp8"},
    "nf4": {"quantization": "nf4"}, "mxfp4": {"quantization": "mxfp4"},
}  # fmt: skip


def test_every_format_of_experts_can_be_divided(tmp_path: Path) -> None:
    made = Checkpoint("mixtral", tmp_path / "dense")
    folders: dict[str, tuple[Path, dict[str, Any]]] = {
        name: (made.folder, options) for name, options in FORMATS.items()
    }
    for name, (config, convert, _) in FILES.items():
        made.quantized(tmp_path / name, config, convert)
        folders[name] = tmp_path / name, {}
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


def test_each_rank_reads_and_keeps_its_own_experts(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", **MIXTURES["mixtral"][1])
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8"}
    whole = load(tmp_path, backend("cpu"), **options).report

    def work(comm: Comm) -> None:
        report = load(tmp_path, backend("cpu"), place_of(comm), **options).report
        assert report["expert_down"][1] * 2 == whole["expert_down"][1] and report["q+k+v"] == whole["q+k+v"]

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
    """Chunked prompts, preempted sequences, looked-up drafts, recorded steps; requests come when they like."""
    found, stats = answers(
        skewed, random.Random(1), expert_parallel_size=2, num_blocks=14, max_num_batched_tokens=32, max_num_seqs=16,
        speculative_config='{"method": "ngram", "adaptive": false}',
    )  # fmt: skip
    assert found == alone and stats.preemptions and stats.accepted_tokens
    assert len(stats.expert_pairs) == 2 and stats.expert_imbalance > 1.2


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
    assert second == first and after.expert_imbalance < 1.15 < before.expert_imbalance


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for options, why in (
        ({"enable_expert_parallel": True}, "there is one rank to give experts to"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2, "expert_parallel_size": 2}, "use one of them"),
        ({"num_redundant_experts": 1}, "every rank has all experts"),
        ({"expert_load_file": "x"}, "every rank has all experts"),
        ({"num_redundant_experts": -1, "expert_parallel_size": 2}, "at least 0"),
        ({"expert_parallel_size": 65}, "must lie in"),
        ({"expert_parallel_size": 16, "tensor_parallel_size": 16}, "more than 64 ranks"),
        (
            {"expert_parallel_size": 2, "speculative_config": '{"method": "self", "quantization": "int4"}'},
            "read what is",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            flat_config(**({"model": "m"} | options))
    write(tmp_path / "dense", "llama")
    write(tmp_path / "mixtral", "mixtral", **MIXTURES["mixtral"][1])
    place = Place(Topology(expert=2), 0, {}, ExpertPlan("expert"))
    with pytest.raises(ConfigError, match="'llama' models have no experts to divide"):
        load(tmp_path / "dense", backend("reference"), place)
    for plan, size, why in ((ExpertPlan("expert"), 9, "8 experts cannot be divided among 9 ranks"),
                            (ExpertPlan("expert", 9), 2, "2 ranks with all 8 experts have 8 copies")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            load(tmp_path / "mixtral", backend("reference"), Place(Topology(expert=size), 0, {}, plan))
    for text in ("[[1, -2]]", "{}", "[[1,"):
        (tmp_path / "counts").write_text(text)
        with pytest.raises(ConfigError, match="--expert-load-file"):
            read_counts(tmp_path / "counts")
    write_counts(tmp_path / "counts", SKEWED_TWICE := ((1, 2), (3, 4)))
    assert read_counts(tmp_path / "counts") == SKEWED_TWICE and read_counts(tmp_path / "none") == ()


def test_a_rank_that_dies_ends_the_group_which_is_started_again(skewed: Path, alone: dict[str, bytes]) -> None:
    """Killed in the middle; the group that follows goes on with every request."""
    config = flat_config(model=str(skewed), device="cpu", dtype="float32", num_blocks=512, expert_parallel_size=2)
    engines: list[ProcessEngine] = []

    def start(before: EngineInfo | None, given_up: Callable[[], bool]) -> ProcessEngine:
        engines.append(ProcessEngine(config, None, given_up))
        return engines[-1]

    requests = make_requests(16, 99)
    found = {request.id: Answer([], []) for request in requests}
    with closing(SupervisedEngine(start, Patience(hang=0), config.scheduler)) as client:
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
    pid = engine._process.pid
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
