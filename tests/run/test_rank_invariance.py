"""With --rank-invariant any number of ranks gives the same bits; rows split between the joins change none."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from oracle import BACKENDS
from parallel_pairs import PYDOC, Folders
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.model.net.sequence_parallel import FEW, rows_of
from speculation_methods import answers, requests_of

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
FORMS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "bf16": {},
    "int4 in groups of 64": {"quantization": "int4", "group_size": 64},
    "windows": {"model": "windows"},
    "experts": {"model": "experts"},
    "latents": {"model": "latents"},
    "scans": {"model": "scans"},
    "layers of one part": {"model": "layers_of_one_part"},
    "a scan beside attention": {"model": "beside"},
    "experts whose scores scale rows": {"model": "chunks"},
}
OFTEN = ("int8", "experts whose scores scale rows")
"""What every run tries; the slow one tries all."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def bits(folders: Folders, count: int, **options: Any) -> dict[str, list[bytes]]:
    """Of `count` requests' answers, which trickle in."""
    model = folders(options["model"]) if "model" in options else PYDOC
    options |= {"model": model, "max_model_len": 128, "threads": 1}
    with closing(LocalEngine(flat_config(**options))) as engine:
        requests: list[Request] = requests_of(6144 if model == PYDOC else 99, "")[:count]
        return {name: [row.bits() for row in rows] for name, rows in answers(engine, requests).items()}


def often(names: tuple[str, ...] = OFTEN) -> list[Any]:
    return [pytest.param(form, marks=[] if form in names else [pytest.mark.slow]) for form in FORMS]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", often())
def test_any_number_of_ranks_gives_the_same_bits(form: str, ranks: int, folders: Folders) -> None:
    def found(ranks: int) -> dict[str, list[bytes]]:
        return bits(folders, 4, rank_invariant=True, tensor_parallel_size=ranks, **FORMS[form])

    assert found(ranks) == found(1)


def test_runs_whose_experts_scale_rows_have_the_rows_as_they_were(folders: Folders) -> None:
    def log_probabilities(invariant: bool) -> list[float]:
        options = {"model": folders("chunks"), "max_model_len": 128, "threads": 1, "dtype": "float32"}
        with closing(LocalEngine(flat_config(**options, rank_invariant=invariant))) as engine:
            (answer,) = answers(engine, requests_of(99, "")[:1]).values()
        return [entry.logprob for row in answer for entry in row.logprobs]

    assert log_probabilities(True) == pytest.approx(log_probabilities(False), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_rows_split_between_the_joins_change_no_bit(form: str, folders: Folders) -> None:
    def found(split: bool, ranks: int) -> dict[str, list[bytes]]:
        own = {"enable_sequence_parallel": split, "tensor_parallel_size": ranks} | FORMS[form]
        return bits(folders, 9, **own)

    for ranks in (2, 4):
        assert found(True, ranks) == found(False, ranks), f"{ranks} ranks"


def test_rows_are_split_where_there_are_many() -> None:
    assert rows_of(2 * FEW - 1, 2) == ()
    assert rows_of(2 * FEW + 1, 2) == (FEW, FEW + 1)
    assert sum(rows_of(1000, 3)) == 1000


def test_what_does_not_go_with_them_is_said(folders: Folders) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"enable_sequence_parallel": True}, "one rank has all rows"),
        ({"enable_sequence_parallel": True, "tensor_parallel_size": 2,
          "speculative_config": '{"method": "self", "layers": 1}'}, "stop between layers"),
        ({"enable_sequence_parallel": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
         "have rows of their"),
        ({"rank_invariant": True, "expert_parallel_size": 2}, "are not summed in runs"),
        ({"rank_invariant": True, "enable_lora": True}, "what adapters add is summed by rank"),
        ({"rank_invariant": True, "tensor_parallel_size": 3, "model": folders("experts")}, "cannot be"),
    )  # fmt: skip
    for options, why in refused:
        with pytest.raises(ConfigError, match=why):
            bits(folders, 1, **options)
