"""What towers compute without ops: torch's bits where torch is the model of it, and no torch in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oracle import BACKENDS
from quire.model.families.rope import Plain, Rope
from quire.model.tower_sizes import Patches
from quire.model.vision.interpolation import Floats, bicubic, bilinear
from quire.model.vision.patch_positions import LEARNED, borders_of, cut, turns
from quire.model.vision.tower import averages
from vision_models import make_vision_model
from vision_oracle import patches

FUSED = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether torch's kernels are those whose bits are kept: others round other products, or add in another order."""
SIZES = [((6, 6), (2, 2)), ((24, 24), (40, 62)), ((48, 48), (34, 60)), ((37, 37), (37, 50)), ((16, 24), (75, 64))]


def stretched(table: Floats, size: tuple[int, int], mode: str, corners: bool | None) -> Floats:
    """By torch."""
    channels_first = torch.from_numpy(table).permute(2, 0, 1)[None]
    found = F.interpolate(channels_first, size, mode=mode, align_corners=corners)[0].permute(1, 2, 0)
    return found.numpy()


def assert_same(got: Floats, want: Floats) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert np.array_equal(got, want) if FUSED else np.abs(got - want).max() <= 1e-4


@pytest.mark.parametrize(("side", "size"), SIZES)
def test_tables_are_stretched_to_the_bits_of_torch(side: tuple[int, int], size: tuple[int, int]) -> None:
    table = np.random.default_rng(0).standard_normal((*side, 24), np.float32)
    assert_same(bilinear(table, *size, corners=True), stretched(table, size, "bilinear", True))
    assert_same(bilinear(table, *size, corners=False), stretched(table, size, "bilinear", False))
    assert_same(bicubic(table, *size), stretched(table, size, "bicubic", False))


@pytest.mark.parametrize("size", [(54, 60), (90, 70)])
def test_a_part_of_the_columns_of_a_table_is_stretched_alike(size: tuple[int, int]) -> None:
    table = np.random.default_rng(0).standard_normal((81, 89, 16), np.float32)
    for part in (table[4:-4], table[:, 4:-4]):
        assert_same(bilinear(part, *size, corners=False), stretched(part, size, "bilinear", False))


def test_places_of_patches_fall_into_the_buckets_of_torch() -> None:
    for side in (1, 2, 16, 26, 27, 32, 64, 70, 90):
        assert np.array_equal(borders_of(side), torch.arange(1 / side, 1.0, 1 / side).numpy()) or not FUSED
        for count in {1, 3, side - 1, side, side + 1, 2 * side, 33} - {0}:
            borders, places = torch.arange(1 / side, 1.0, 1 / side), torch.arange(count).float()
            want = torch.bucketize((places * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6), borders, right=True)
            grid = np.arange(side, dtype=np.float32)[:, None, None].repeat(side, 1)
            assert LEARNED["buckets"](grid, count, 1)[:, 0, 0].tolist() == want.tolist() or not FUSED


def test_cosines_and_sines_are_those_of_float64() -> None:
    for dim, head_dim in ((32, 64), (64, 64)):
        rope = Rope(10000.0, dim, Plain())
        frequencies = torch.from_numpy(rope.scaling.inverse_frequencies(rope.theta, rope.dim, 1))
        lines, across = (frequencies, frequencies) if dim < head_dim else (frequencies[::2], frequencies[1::2])
        row, column = torch.arange(40 * 60) // 60, torch.arange(40 * 60) % 60
        angles = torch.cat((row[:, None] * lines, column[:, None] * across), 1)
        want = torch.stack((angles.double().cos(), angles.double().sin()), 1).float().numpy()
        assert np.abs(turns(rope, head_dim, 40, 60, 1) - want).max() <= 6e-8
        assert np.abs(want - torch.stack((angles.cos(), angles.sin()), 1).numpy()).max() <= 1.2e-7


@pytest.mark.parametrize("rows", [1, 4, 16, 25, 64, 256])
def testaverages_of_squares_have_the_bits_of_torch(rows: int) -> None:
    squares = np.random.default_rng(rows).standard_normal((7, rows, 64), np.float32)
    assert_same(averages(squares), torch.from_numpy(squares).mean(1).numpy())


def test_pixels_are_cut_into_the_patches_of_qwen() -> None:
    pixels = np.random.default_rng(0).standard_normal((1, 50, 36, 3), np.float32)
    got = cut(pixels, Patches(8, frames=2, merge=2, grid=(1, 1)))
    want, grid = patches(torch.from_numpy(pixels[:, :48, :32]).permute(0, 3, 1, 2))
    channels_last = want.view(len(want), 3, 2, 64).permute(0, 2, 3, 1).reshape(len(want), -1)
    assert grid.tolist() == [[1, 6, 4]] and np.array_equal(got, channels_last.numpy())
    assert np.array_equal(cut(torch.from_numpy(pixels), Patches(8, frames=2, merge=2, grid=(1, 1))).numpy(), got)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from quire.core.config import DeviceConfig, flat_config
from quire.core.images import PromptImage
from quire.model.build import load_model
from quire.ops.backend import open_backend
vision = load_model(flat_config(model=sys.argv[1]), open_backend(DeviceConfig(device="cpu", threads=1))).vision
shown = PromptImage(key=b"", pixels=bytes(range(240)) * 64, shape=(1, 80, 64), runs=((0, 20),), size=(80, 64))
print(type(vision(shown)).__module__, vision(shown).shape)
"""


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
def test_a_tower_runs_without_torch(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout == "numpy (20, 192)\n"
