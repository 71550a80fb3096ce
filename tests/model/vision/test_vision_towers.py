"""Features of images equal transformers' for every family; a decoder's options leave them as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from oracle import BACKENDS, logits, relative_error
from paged_model import Paged
from quire.core.config import DeviceConfig, flat_config
from quire.model.build import load_model
from quire.model.describe import describe
from quire.model.families.multimodal import MULTIMODAL
from quire.model.spec import Sight
from quire.ops.backend import Ops, open_backend
from vision_models import FAMILIES, family_of
from vision_oracle import CASES, SHAPES, Made, any_size, prompt_image, see

TOLERANCE = 1e-5
ROUNDED = {"gemma4": 3e-5}
"""Where rounding alone is more: transformers' own features in f32 are 1.4e-5 from those in f64."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda name: Made(name, tmp_path_factory.mktemp(name)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(("name", "shape", "size"), CASES)
def test_features_equal_transformers(
    name: str, shape: tuple[int, int, int], size: tuple[int, int], device: str, made: Callable[[str], Made]
) -> None:
    shown, want = made(name).want(shape, size)
    model = made(name).load(device)
    assert model.vision is not None and model.vision.width == want.shape[1]
    got = see(model, shown)
    assert got.shape == want.shape and got.dtype is torch.float32
    assert relative_error(got, want) <= ROUNDED.get(name, TOLERANCE)
    assert torch.equal(see(model, shown), got)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_without_images_run_as_the_text_model(name: str, made: Callable[[str], Made]) -> None:
    tokens = torch.randint(40, 290, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    (got,) = Paged(made(name).load(BACKENDS[-1]), [tokens]).run([[12], [7]])
    assert relative_error(got, logits(made(name).oracle, tokens)) <= 1e-5


def test_the_decoder_is_told_what_images_change(made: Callable[[str], Made]) -> None:
    found = {name: describe(str(made(name).folder)).spec.sight for name in FAMILIES}
    assert found.pop("qwen2_vl") == found.pop("qwen2_5_vl") == Sight((2, 3, 3))
    assert found.pop("qwen3_vl_moe") == found.pop("qwen3_vl") == Sight((6, 3, 3), True, 2)
    assert found.pop("qwen3_5") == found.pop("qwen3_5_moe") == Sight((3, 3, 2), True)
    assert found.pop("gemma3") == Sight(mutual=True)
    assert found.pop("gemma4") == Sight(token=5)
    assert found.pop("gemma4_moe") == found.pop("gemma4_unified") == Sight(mutual=True, windows=True)
    assert set(found.values()) == {Sight()}


@pytest.mark.parametrize("device", BACKENDS)
def test_pieces_and_blocks_change_no_bit(
    device: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen2_5_vl", "llava_next"):
        shape = (1, 64, 80) if name == "qwen2_5_vl" else any_size(name, (40, 70))
        shown, _ = made(name).want(shape, (40, 70))
        model = made(name).load(device)
        want = see(model, shown)
        monkeypatch.setattr("quire.model.vision.tower.PIECE", 7)
        monkeypatch.setattr("quire.model.vision.tower_attention.BLOCK", 16)
        monkeypatch.setattr("quire.model.vision.tower_attention.PIECE", 5)
        monkeypatch.setattr("quire.model.vision.torch_attention.PIECE", 5)
        got = see(model, shown)
        assert torch.equal(got, want) if device == "cpu" else relative_error(got, want) < 1e-6
        monkeypatch.undo()


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_quantized_decoder_leaves_the_tower_as_it_is(name: str, made: Callable[[str], Made]) -> None:
    shown, want = made(name).want(SHAPES[name][0], (77, 99))
    plain = made(name).load("cpu", dtype="bfloat16")
    got = see(plain, shown)
    assert relative_error(got, want) < 0.03
    for how in ("int8", "int4"):
        model = made(name).load("cpu", dtype="bfloat16", quantization=how)
        assert model.vision is not None and plain.vision is not None
        assert torch.equal(see(model, shown), got) and model.vision.nbytes == plain.vision.nbytes
        assert model.weight_bytes < plain.weight_bytes and model.quantization == how
    narrow = load_model(flat_config(model=str(made(name).folder), dtype="bfloat16", bf16_bits=12), twelve())
    assert torch.equal(see(narrow, shown), got) and narrow.report["vision"] == plain.report["vision"]


def twelve() -> Ops:
    """The native backend with matrices in 12 bits where that loses nothing."""
    return open_backend(DeviceConfig(device="cpu", threads=2, bf16_bits=12))


def test_an_image_that_was_not_prepared_for_the_tower_is_refused(made: Callable[[str], Made]) -> None:
    model = made("gemma3").load(BACKENDS[-1])
    with pytest.raises(ValueError, match="the tower makes 4 rows of an image that has 3 in the prompt"):
        see(model, prompt_image((1, 32, 32), (32, 32), 3))
    with pytest.raises(ValueError, match="4 x 8 patches, the tower has positions of 4 x 4"):
        see(model, prompt_image((1, 32, 64), (32, 64), 8))
    model = made("qwen2_vl").load(BACKENDS[-1])
    with pytest.raises(ValueError, match="are not squares of 2 x 2"):
        see(model, prompt_image((1, 32, 40), (32, 40), 5))


def test_each_model_type_has_a_folder_in_the_tests() -> None:
    assert {family_of(name) for name in FAMILIES} == set(MULTIMODAL)
    assert {name for name, _, _ in CASES} == set(FAMILIES)
