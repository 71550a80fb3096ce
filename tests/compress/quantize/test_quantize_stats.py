"""Statistics of activations: as their definitions say by any cut into batches, saved and continued bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.compress.calibration.statistics import BLOCK, InputStatistics, output_error
from quire.core.errors import ModelError

ROWS = torch.randn((61, 24), generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 9, 24)


def observed(cuts: list[int]) -> InputStatistics:
    inputs = InputStatistics(24, InputStatistics.PARTS)
    for start, stop in zip([0, *cuts], [*cuts, len(ROWS)], strict=True):
        inputs.add(ROWS[start:stop])
    return inputs


def parts(inputs: InputStatistics) -> dict[str, Tensor]:
    return {name: getattr(inputs, name) for name in InputStatistics.PARTS}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(ROWS)), max_size=12))
def test_any_cut_into_batches_gives_the_definitions(cuts: list[int]) -> None:
    found, x = observed(sorted(cuts)), ROWS.double()
    wanted = {
        "hessian": 2 / len(x) * sum(torch.outer(row, row) for row in x),
        "norms": x.norm(dim=0),
        "peak": x.abs().amax(0),
        "mean_abs": x.abs().mean(0),
    }
    assert found.rows == len(ROWS)
    for name, tensor in parts(found).items():
        assert tensor.dtype is torch.float32
        assert float((tensor - wanted[name]).abs().max() / wanted[name].abs().max()) < 1e-6, name


def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = observed([20, 40])
    first = InputStatistics(24, InputStatistics.PARTS)
    first.add(ROWS[:20])
    first.save(tmp_path / "inputs.safetensors")
    second = InputStatistics.load(tmp_path / "inputs.safetensors")
    second.add(ROWS[20:40])
    second.add(ROWS[40:])
    assert second.rows == whole.rows
    assert all(torch.equal(a, b) for a, b in zip(parts(whole).values(), parts(second).values(), strict=True))


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    inputs = InputStatistics(24, ["peak"])
    inputs.add(ROWS)
    inputs.save(tmp_path / "peak")
    assert (tmp_path / "peak").stat().st_size < 1024
    assert torch.equal(InputStatistics.load(tmp_path / "peak").peak, ROWS.abs().amax(0))
    with pytest.raises(KeyError):
        _ = inputs.hessian
    with pytest.raises(ValueError, match="'hesian' is nothing"):
        InputStatistics(24, ["hesian"])


def test_outlier_columns_reach_the_threshold() -> None:
    inputs = InputStatistics(4, ["peak"])
    inputs.add(torch.tensor([[1.0, -6.0, 5.9, 2.0], [0.0, 1.0, 1.0, 70.0]]))
    assert inputs.outlier_columns().tolist() == [1, 3]
    assert inputs.outlier_columns(5.5).tolist() == [1, 2, 3]


def test_bad_rows_and_files_are_refused(tmp_path: Path) -> None:
    inputs = InputStatistics(24, ["peak"])
    with pytest.raises(ModelError, match="nan or inf"):
        inputs.add(torch.full((1, 24), torch.nan))
    with pytest.raises(ValueError, match=r"not \[T, 24\]"):
        inputs.add(torch.zeros(3, 23))
    assert inputs.rows == 0
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="does not hold statistics"):
        InputStatistics.load(tmp_path / "bad")


def test_output_error_is_that_of_the_outputs() -> None:
    d = torch.randn((5, 24), generator=torch.Generator().manual_seed(4))
    wanted = float((ROWS.double() @ d.double().t()).square().sum(1).mean())
    assert output_error(d, observed([]).hessian) == pytest.approx(wanted, rel=1e-5)


def test_a_wide_hessian_is_whole() -> None:
    """It is summed in blocks of columns, of which a half is computed."""
    x = torch.randn((3, 2 * BLOCK + 100), generator=torch.Generator().manual_seed(6))
    inputs = InputStatistics(x.shape[1], ["hessian"])
    inputs.add(x[:2])
    inputs.add(x[2:])
    wanted = 2 / 3 * (x.double().t() @ x.double())
    for found in (inputs.hessian, inputs.take_hessian()):
        assert torch.allclose(found.double(), wanted, atol=1e-5) and found.dtype is torch.float32
