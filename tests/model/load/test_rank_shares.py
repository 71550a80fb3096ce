"""Two ranks that each load their share give the logits of the whole model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from loaded_folders import KEPT, made_anew
from lora_adapters import KINDS, TARGETS, Extended, write_adapter
from model_variants import SHARED_OUT
from oracle import backend, relative_error, write
from oracle import logits as whole_logits
from paged_model import Paged, prompt
from quire.core.config import DeviceConfig, flat_config
from quire.core.errors import ConfigError
from quire.model.build import Model, load_model
from quire.model.load.packed_writing import finish_all
from quire.model.load.roles import Share
from quire.ops.backend import open_backend
from quire.ops.latents import LatentLayout
from quire.ops.native import load_native
from quire.parallel.comm import Comm
from quire.parallel.rank_place import RankPlace
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.topology import Topology
from sparse_variants import SPARSE, WHOLE

WORLD = 2
NAMES = ("hy_v4", "axk2", "dots3_note", "qwen4_exp_short")
MODELS = SHARED_OUT | {name: (SPARSE | WHOLE)[name] for name in NAMES}
pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")


def place(share: Share, comm: Comm | None = None) -> RankPlace:
    return RankPlace(Topology(tensor=share.world), share.rank, {} if comm is None else {"tensor": comm})


def load(folder: Path, share: Share, comm: Comm | None = None, **options: Any) -> Model:
    config = flat_config(model=str(folder), dtype="float32", **options)
    return load_model(config, backend("reference"), place=place(share, comm))


def logits(model: Model, adapter: int = -1) -> Tensor:
    tokens = prompt(23, 1)
    if model.adapters is not None:
        model.adapters.rows[:] = adapter
    return Paged(model, [tokens]).run([[9], [14]])[0].clone()


def together(folder: Path, adapter: int = -1, **options: Any) -> list[Tensor]:
    """The logits that each of the ranks, here threads, has at the end."""
    file = shared_memory(comm_bytes(WORLD))

    def run(rank: int) -> Tensor:
        comm = SharedComm(file, rank, WORLD, crowded=True)
        return logits(load(folder, Share(rank, WORLD), comm, **options), adapter)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    family, facts = MODELS[name]
    write(tmp_path, family, **facts)
    want = logits(load(tmp_path, Share()))
    for got in together(tmp_path):
        assert got.shape == want.shape and relative_error(got, want) <= 1e-5


def test_adapters_are_cut_like_their_matrices(tmp_path: Path) -> None:
    oracle = write(tmp_path / "model", "llama")
    folder = write_adapter(tmp_path / "adapter", oracle, TARGETS["llama"], seed=3)
    options: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"a={folder}",)}
    whole = load(tmp_path / "model", Share(), **options)
    plain, want = logits(whole), logits(whole, 0)
    assert relative_error(plain, want) > 1e-2
    for got in together(tmp_path / "model", 0, **options):
        assert relative_error(got, want) <= 1e-5


def test_what_else_adapters_hold_is_cut_like_their_matrices(tmp_path: Path) -> None:
    """DoRA, biases, tables, heads and tokens of their own; what the first rank has in the end is what is sampled."""
    oracle = write(tmp_path / "model", "llama", attention_bias=True)
    kinds = ("dora", "bias", "tables", "saved", "tokens", "tokens of both", "plain")
    layouts = {kind: KINDS[kind](oracle, i) for i, kind in enumerate(kinds)}
    modules = tuple(f"{kind}={layout.write(tmp_path / kind)}" for kind, layout in layouts.items())
    sequences = [[3, 9, 41, 50, *prompt(4 + i, i)] for i in range(len(kinds))]
    file = shared_memory(comm_bytes(WORLD))

    def run(rank: int) -> list[Tensor]:
        comm = SharedComm(file, rank, WORLD, crowded=True)
        model = load(tmp_path / "model", Share(rank, WORLD), comm, enable_lora=True, lora_modules=modules)
        return [rows.clone() for rows in Extended(model, sequences, list(kinds)).run([[len(s) for s in sequences]])]

    with ThreadPoolExecutor(WORLD) as pool:
        first = next(iter(pool.map(run, range(WORLD))))
    for kind, sequence, got in zip(kinds, sequences, first, strict=True):
        assert relative_error(got, whole_logits(layouts[kind].merged, sequence)) <= 1e-5, kind


def test_magnitudes_of_the_table_of_tokens_are_refused(tmp_path: Path) -> None:
    oracle = write(tmp_path / "model", "llama")
    folder = KINDS["dora of tables"](oracle, 0).write(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="norms over the rows of all ranks"):
        load(tmp_path / "model", Share(0, 2), enable_lora=True, lora_modules=(f"a={folder}",))


def test_a_share_caches_its_own_heads_and_latents_whole(tmp_path: Path) -> None:
    write(tmp_path / "heads", "llama")
    write(tmp_path / "latents", KEPT["latents"][0], **KEPT["latents"][1])
    assert [load(tmp_path / "heads", share).layouts[0][0].kv_heads for share in (Share(), Share(1, 2))] == [2, 1]
    latent = load(tmp_path / "latents", Share(1, 2)).layouts[0][0]
    assert isinstance(latent, LatentLayout) and latent.rank == 32


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    with pytest.raises(
        ConfigError, match="4 attention heads cannot be split over --tensor-parallel-size 3; 1, 2 and 4 can"
    ):
        load(tmp_path, Share(0, 3))


def test_each_share_keeps_its_own_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "llama", vocab_size=100)
    ops = open_backend(DeviceConfig(device="cpu"))
    config = flat_config(model=str(tmp_path), dtype="bfloat16", cache_packed=str(tmp_path / "kept"))
    shares = Share(), Share(0, 2), Share(1, 2)
    models = [load_model(config, ops, place=place(share)) for share in shares]
    finish_all()
    sizes = [model.weight_bytes for model in models]
    made = made_anew(monkeypatch)
    assert [load_model(config, ops, place=place(share)).weight_bytes for share in shares] == sizes
    assert sizes[0] > sizes[1] == sizes[2] and not made and len(list((tmp_path / "kept").iterdir())) == 3
