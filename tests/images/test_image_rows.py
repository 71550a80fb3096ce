"""Rows of images: their ids, where they are in a step, and their positions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from quire.core.images import PromptImage, grid_positions, grid_shift, pieces, placeholders

GRIDS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 5)), max_size=4)
"""Of each image: tokens of text before it, rows, columns."""


def placed(grids: list[tuple[int, int, int]]) -> list[PromptImage]:
    """Images of one run of rows each."""
    found, at = [], 0
    for gap, height, width in grids:
        at += gap
        runs = ((at, height * width),)
        found.append(PromptImage(key=b"", pixels=b"", shape=(1, 1, 1), runs=runs, size=(1, 1), grid=(height, width)))
        at += height * width
    return found


def end_of(images: list[PromptImage]) -> int:
    """Of the last row of an image."""
    return images[-1].end if images else 0


@settings(max_examples=60, deadline=None)
@given(GRIDS, st.integers(1, 6), st.data())
def test_positions_of_a_part_are_a_part_of_the_positions(
    grids: list[tuple[int, int, int]], behind: int, data: st.DataObject
) -> None:
    images = placed(grids)
    total = end_of(images) + behind
    whole = grid_positions(images, 0, total)
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    np.testing.assert_array_equal(grid_positions(images, start, end), whole[:, start:end])
    for index in range(end_of(images), total):
        assert (whole[:, index] == index + grid_shift(images, index)).all()


VISION = {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 8, "vocab_size": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                                     "mrope_section": [1, 1, 0]}}  # fmt: skip


def test_positions_are_those_of_transformers() -> None:
    model = Qwen2VLModel(Qwen2VLConfig(vision_config=VISION, text_config=TEXT))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        grids = [(1 + int(rng.integers(5)), *map(int, rng.integers(1, 6, 2))) for _ in range(seed % 4)]
        images = placed(grids)
        total = end_of(images) + int(rng.integers(1, 9))
        kinds = torch.zeros(1, total, dtype=torch.int)
        for image in images:
            kinds[0, image.start : image.end] = 1
        sizes = torch.tensor([[1, 2 * height, 2 * width] for _, height, width in grids]).reshape(-1, 3)
        expected, shift = model.get_rope_index(torch.zeros(1, total, dtype=torch.long), kinds, sizes)
        np.testing.assert_array_equal(grid_positions(images, 0, total), expected[:, 0].numpy())
        assert grid_shift(images, total) == shift.item()


RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5)
"""Of each run: tokens before it, rows."""


@settings(max_examples=60, deadline=None)
@given(RUNS, st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_pieces_of_steps_cover_each_feature_once_and_in_order(runs: list[tuple[int, int]], steps: list[int]) -> None:
    at, starts = 0, []
    for gap, count in runs:
        starts.append((at + gap, count))
        at += gap + count
    image = PromptImage(key=b"", pixels=b"", shape=(1, 1, 1), runs=tuple(starts), size=(1, 1))
    total = image.end + 3
    rows = [row for start, count in starts for row in range(start, start + count)]
    assert image.rows == len(rows) and image.start == rows[0] and image.end == rows[-1] + 1
    found, at = [], 0
    for step in [*steps, total]:
        end = min(at + step, total)
        for row, feature, count in pieces(image, at, end):
            assert row >= 0 and row + count <= end - at
            found += [(at + row + i, feature + i) for i in range(count)]
        at = end
    assert found == [(row, i) for i, row in enumerate(rows)]


def test_ids_of_rows_tell_images_apart() -> None:
    one, other = placeholders(b"a" * 16, 100, 1000), placeholders(b"b" * 16, 100, 1000)
    assert placeholders(b"a" * 16, 10, 1000) == one[:10]
    assert not set(one) & set(other) and len(set(one)) == 100
    assert all(1000 <= i < 1 << 31 for i in one + other)
