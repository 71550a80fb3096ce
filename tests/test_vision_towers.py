"""Features of pictures equal transformers' for every family; every tensor of a vision part is claimed; its account."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.image_processing_utils import select_best_resolution

from often import one_of
from oracle import BACKENDS, backend, edit_config, logits, relative_error
from quire.cli import main
from quire.compress.net import Net
from quire.core.config import flat_config
from quire.core.errors import ModelError
from quire.core.pictures import Picture
from quire.model.build import Model, load_model
from quire.model.describe import describe, open_model
from quire.model.families.pictured import PICTURED, REFUSED
from quire.model.spec import Sight
from quire.model.vision.reading import HALF, Pixels, read_pixels
from quire.ops.backend import Ops
from quire.ops.choice import choose
from quire.plan.weights import weight_parts
from test_model import Paged
from vision_models import CONFIGS, FAMILIES, PINPOINTS, PREPROCESSORS, family_of, make_vision_model, write_files

TOLERANCE = 1e-4
TILE = 32
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "llava": [(1, 56, 56)],
    "llava_siglip": [(1, 32, 32)],
    "llava_pixtral": [(1, 64, 64), (1, 32, 48), (1, 24, 64)],
    "qwen2_vl": [(1, 32, 48), (1, 16, 16), (1, 64, 64)],
    "qwen2_5_vl": [(1, 64, 48), (1, 48, 80), (1, 16, 64)],
    "qwen3_vl": [(1, 48, 48), (1, 32, 64), (1, 80, 16)],
    "gemma3": [(1, 32, 32)],
    "mistral3": [(1, 64, 64), (1, 32, 48)],
    "idefics3": [(5, 32, 32), (1, 32, 32), (1, 48, 48)],
    "smolvlm": [(5, 32, 32), (1, 64, 64)],
    "internvl": [(1, 32, 32), (3, 32, 32), (1, 48, 48)],
    "internvl_norms": [(3, 32, 32)],
}
"""Tiles, height and width of pictures, as a processor cuts them."""
SIZES = [(40, 70), (32, 32), (100, 30), (20, 64), (300, 310)]
"""Height and width of pictures as they come, whose tiles follow."""


def any_size(name: str, size: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles of a picture of `size`, the whole of it first."""
    height, width = select_best_resolution(size, CONFIGS[name]["image_grid_pinpoints"])
    return 1 + height // TILE * width // TILE, TILE, TILE


CASES = [(name, shape, (77, 99)) for name, shapes in SHAPES.items() for shape in shapes]
CASES += [(name, any_size(name, size), size) for name in ("llava_next", "llava_onevision") for size in SIZES]
CASES += [("llava_onevision", (1, TILE, TILE), (50, 60))]


def picture(shape: tuple[int, int, int], size: tuple[int, int], rows: int, seed: int = 0) -> Picture:
    """Noise of tiles of `shape`, whose features are `rows` in one run."""
    pixels = torch.randint(0, 256, (*shape, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Picture(key=b"k" * 16, pixels=pixels.numpy().tobytes(), shape=shape, runs=((5, rows),), size=size)


def normalized(name: str, made: Picture) -> Tensor:
    """What the processor would give: [tiles, 3, height, width] f32."""
    told = PREPROCESSORS[name]
    values = torch.from_numpy(made.image.copy()).float() / 255
    return ((values - torch.tensor(told["image_mean"])) / torch.tensor(told["image_std"])).permute(0, 3, 1, 2)


def patches(pixels: Tensor, size: int = 8, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Qwen's input: patches of two equal frames in squares of `merge` a side, and how many there are."""
    rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
    grid = pixels[0].view(3, rows // merge, merge, size, columns // merge, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
    frames = grid.reshape(rows * columns, 3, 1, size * size).expand(-1, -1, 2, -1)
    return frames.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]])


@torch.no_grad()
def features(name: str, model: PreTrainedModel, made: Picture) -> Tensor:
    """transformers' features [rows, width] of a picture; further ones stand beside them."""
    pixels, whole, height = normalized(name, made), model.model, made.shape[1:]
    if name in QWEN:
        cut, grid = patches(pixels)
        found = whole.get_image_features(cut, image_grid_thw=grid)
        deep = [part[0] for part in found.deepstack_features] if name == "qwen3_vl" else []
        return torch.cat((found.pooler_output[0], *deep), 1)
    if name in ("llava_next", "llava_onevision"):
        more = {"batch_num_images": torch.tensor([2])} if name == "llava_onevision" and len(pixels) == 1 else {}
        sizes = torch.tensor([made.size])
        return whole.get_image_features(pixels[None], image_sizes=sizes, **more).pooler_output[0]
    if name in ("mistral3", "llava_pixtral"):
        return whole.get_image_features(pixels, image_sizes=torch.tensor([height])).pooler_output[0]
    if name in ("idefics3", "smolvlm"):
        return whole.get_image_features(pixels[None]).pooler_output[0]
    found = whole.get_image_features(pixels).pooler_output
    return torch.cat([part for part in found])


class Made:
    """A folder of a family, and the model in it by transformers' code; written once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.oracle = make_vision_model(name, folder)

    @cache  # noqa: B019  (there is one object for each family, which the module keeps)
    def load(self, device: str, **options: Any) -> Model:
        return load_model(flat_config(model=str(self.folder), **options), backend(device))

    def want(self, shape: tuple[int, int, int], size: tuple[int, int]) -> tuple[Picture, Tensor]:
        """A picture and transformers' features of it."""
        want = features(self.name, self.oracle, picture(shape, size, 1))
        return picture(shape, size, len(want)), want


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda name: Made(name, tmp_path_factory.mktemp(name)))


def see(model: Model, shown: Picture) -> Tensor:
    assert model.vision is not None
    return model.vision(shown)


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
    assert relative_error(got, want) <= TOLERANCE
    assert torch.equal(see(model, shown), got)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_without_pictures_run_as_the_text_model(name: str, made: Callable[[str], Made]) -> None:
    tokens = torch.randint(40, 290, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    (got,) = Paged(made(name).load(BACKENDS[-1]), [tokens]).run([[12], [7]])
    assert relative_error(got, logits(made(name).oracle, tokens)) <= 1e-5


def test_the_decoder_is_told_what_pictures_change(made: Callable[[str], Made]) -> None:
    found = {name: describe(str(made(name).folder)).spec.sight for name in FAMILIES}
    assert found.pop("qwen2_vl") == found.pop("qwen2_5_vl") == Sight((2, 3, 3))
    assert found.pop("qwen3_vl") == Sight((6, 3, 3), True, 2)
    assert found.pop("gemma3") == Sight(mutual=True)
    assert set(found.values()) == {Sight()}


@pytest.mark.parametrize("device", BACKENDS)
def test_pieces_and_threads_change_no_bit(
    device: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen2_5_vl", "llava_next"):
        shape = (1, 64, 80) if name == "qwen2_5_vl" else any_size(name, (40, 70))
        shown, _ = made(name).want(shape, (40, 70))
        model = made(name).load(device)
        want = see(model, shown)
        monkeypatch.setattr("quire.model.vision.tower.PIECE", 7)
        monkeypatch.setattr(model.vision.tower.attention, "_threads", 3)
        assert torch.equal(see(model, shown), want) or (
            device == "reference" and relative_error(see(model, shown), want) < 1e-6
        )
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
    from quire.core.config import DeviceConfig
    from quire.ops.backend import select

    return select(DeviceConfig(device="cpu", threads=2, bf16_bits=12))


OLDER = {
    "model.language_model.": "language_model.model.",
    "model.text_model.": "model.text_model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}
NEWER = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
    "visual.": "model.visual.",
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
}
"""Beginnings of names of older and newer writers."""
OLD_VISUAL = {"model.visual.": "visual.", "model.language_model.": "model."}


def renamed(folder: Path, to: Path, rules: dict[str, str]) -> None:
    """The same checkpoint under other names."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    found = {}
    for name, tensor in load_file(file).items():
        old = next((old for old in rules if name.startswith(old)), "")
        found[rules[old] + name.removeprefix(old) if old else name] = tensor
    save_file(found, file)


@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3", "mistral3", "internvl", *QWEN])
def test_older_and_newer_names_are_the_same_model(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    newer, older = tmp_path / "newer", tmp_path / "older"
    renamed(made(name).folder, newer, NEWER)
    renamed(newer, older, OLD_VISUAL if name in QWEN else OLDER)
    shape = SHAPES[name][0] if name in SHAPES else any_size(name, (40, 70))
    shown, want = made(name).want(shape, (40, 70))
    names = [set(load_file(folder / "model.safetensors")) for folder in (newer, older)]
    assert len(names[0] & names[1]) <= 1
    for folder in (newer, older):
        model = load_model(flat_config(model=str(folder)), backend(BACKENDS[-1]))
        assert relative_error(see(model, shown), want) <= TOLERANCE


def broken(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """What the refusal of a changed checkpoint says."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        open_model(str(to))
    return str(refused.value)


def test_every_tensor_is_claimed_or_named(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = made("llava").folder
    names = sorted(load_file(folder / "model.safetensors"))
    fc1 = next(n for n in names if n.endswith("layers.1.mlp.fc1.weight"))
    tower = fc1.partition("encoder.")[0]
    linear = next(n for n in names if n.endswith("linear_2.weight"))
    said = broken(folder, tmp_path / "left", lambda t: t.update({f"{tower}encoder.layers.0.gate.weight": t[fc1]}))
    assert f"{tower}encoder.layers.0.gate.weight" in said and "clip_vision_model" in said
    said = broken(folder, tmp_path / "more", lambda t: t.update({linear.replace("_2", "_3"): t[linear]}))
    assert linear.replace("_2", "_3") in said and "llava projector" in said
    said = broken(folder, tmp_path / "gone", lambda t: t.pop(fc1))
    assert f"missing tensors: {fc1} (role up)" in said
    said = broken(folder, tmp_path / "bias", lambda t: t.pop(linear.replace("weight", "bias")))
    assert linear.replace("weight", "bias") in said
    said = broken(folder, tmp_path / "wide", lambda t: t.update({fc1: t[fc1][:, :-1].contiguous()}))
    assert f"{fc1} is [96, 63], the config asks for [96, 64]" in said
    said = broken(
        folder,
        tmp_path / "kernel",
        lambda t: t.update({n: t[n][..., :-1].contiguous() for n in names if "patch_embedding" in n}),
    )
    assert "patch_embedding.weight" in said
    last = [n for n in names if "encoder.layers.2." in n or "post_layernorm" in n]
    shutil.copytree(folder, tmp_path / "short")
    save_file({n: t for n, t in load_file(folder / "model.safetensors").items() if n not in last},
              tmp_path / "short" / "model.safetensors")  # fmt: skip
    assert open_model(str(tmp_path / "short")).vision.tower.spec.layers == 2


@pytest.mark.parametrize("name", one_of(2, FAMILIES))
def test_dummy_weights_fit_every_family(name: str, made: Callable[[str], Made]) -> None:
    folder = str(made(name).folder)
    found, dummy = describe(folder), describe(folder, load_format="dummy")
    assert found.vision is not None and dummy.vision is not None
    assert dummy.parameters == found.parameters and dummy.vision.parameters == found.vision.parameters
    assert dummy.vision.tower == found.vision.tower and dummy.vision.projector == found.vision.projector
    shape = SHAPES[name][0] if name in SHAPES else any_size(name, (40, 70))
    shown, want = made(name).want(shape, (40, 70))
    model = made(name).load(BACKENDS[-1], load_format="dummy")
    got = see(model, shown)
    assert got.shape == want.shape and bool(torch.isfinite(got).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_account_counts_the_vision_part(name: str, made: Callable[[str], Made]) -> None:
    config = flat_config(model=str(made(name).folder), device=BACKENDS[-1])
    found, model = describe(config.model.model), made(name).load(BACKENDS[-1])
    assert found.vision is not None and model.vision is not None
    assert model.report["vision"][1] == model.vision.nbytes == 4 * found.vision.parameters
    planned = {part.role: part for part in weight_parts(config, found, choose(config.device))}
    assert abs(planned["vision"].nbytes - model.vision.nbytes) <= 0.03 * model.vision.nbytes
    assert sum(part.nbytes for part in planned.values()) == pytest.approx(model.weight_bytes, rel=0.03)
    skipped = sum(t.nbytes for n, t in load_file(made(name).folder / "model.safetensors").items()
                  if "post_layernorm" in n or ".head." in n or ("layers.2." in n and "vision" in n))  # fmt: skip
    read = model.weight_bytes - model.report["rope"][1]
    assert read <= found.bytes_on_disk <= read + skipped


def test_inspect_shows_the_tower(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "inspect", str(made("qwen3_vl").folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    shown = {name: value.strip() for name, value in rows.items()}
    assert shown["vision tower"] == "qwen3_vl_vision, 3 layers, hidden 64, intermediate 96, 4 heads of 16"
    assert shown["pictures"] == "patches of 8 x 8 pixels, 2 x 2 of them one row"
    assert "first 2 layers" in shown["decoder with pictures"]
    assert shown["vision parameters"].startswith(f"{describe(str(made('qwen3_vl').folder)).vision.parameters:,}")


def test_pixels_are_read_as_the_processor_says(tmp_path: Path) -> None:
    usual = Pixels()
    assert read_pixels(tmp_path, usual) == usual
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_mean": 0.5}}))
    assert read_pixels(tmp_path, usual) == Pixels(HALF, usual.std)
    write_files("gemma3", tmp_path)
    assert read_pixels(tmp_path, usual) == Pixels(HALF, HALF)
    path = tmp_path / "preprocessor_config.json"
    for change, want in (
        ({"do_normalize": False}, Pixels((0.0,) * 3, (1.0,) * 3)),
        ({"do_rescale": False}, Pixels(HALF, HALF, 1.0)),
        ({"rescale_factor": 0.5}, Pixels(HALF, HALF, 0.5)),
    ):
        write_files("gemma3", tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert read_pixels(tmp_path, usual) == want
    for wrong in ([0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, 0.0]):
        path.write_text(json.dumps({"image_std": wrong}))
        with pytest.raises(ModelError, match=r"preprocessor_config.json: image_std: is .* needs three numbers"):
            read_pixels(tmp_path, usual)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llava", {"vision_feature_layer": -9}, "vision_feature_layer: is -9, needs layers from -4 to 3"),
        ("llava", {"vision_feature_select_strategy": "some"}, "'some' is not known; known: default, full"),
        ("llava_next", {"image_grid_pinpoints": [[32, 33]]}, "image_grid_pinpoints: has sizes that tiles of 32"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "'pad' is not supported; anyres_max_ and a number is"),
        ("gemma3", {"mm_tokens_per_image": 5}, "mm_tokens_per_image: is 5, needs a square that divides 4 x 4"),
        ("internvl", {"downsample_ratio": 0.4}, "downsample_ratio: is not supported"),
        ("mistral3", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer: names several layers"),
    ],
)
def test_what_is_not_built_is_refused(
    name: str, fields: dict[str, Any], said: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    shutil.copytree(made(name).folder, tmp_path / "m")
    edit_config(tmp_path / "m", **fields)
    with pytest.raises(ModelError) as refused:
        describe(str(tmp_path / "m"))
    assert said in str(refused.value)


def test_unknown_towers_and_models_are_refused_by_name(made: Callable[[str], Made], tmp_path: Path) -> None:
    shutil.copytree(made("qwen2_vl").folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for part, change, said in (
        ("vision_config", {"model_type": "eva"}, "vision_config: model_type: 'eva' is not a tower that is built"),
        ("vision_config", {"hidden_act": "mish"}, "hidden_act: 'mish' is not known"),
        ("text_config", {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 2, 3]}}, "whose sum is 8"),
    ):
        edit_config(tmp_path / "m", **{part: config[part] | change})
        with pytest.raises(ModelError) as refused:
            describe(str(tmp_path / "m"))
        assert said in str(refused.value)
        edit_config(tmp_path / "m", **config)
    for model_type, why in REFUSED.items():
        edit_config(tmp_path / "m", model_type=model_type)
        with pytest.raises(ModelError) as refused:
            describe(str(tmp_path / "m"))
        assert f"{model_type!r} is not supported: {why}" in str(refused.value)
    with pytest.raises(ModelError, match="takes pictures"):
        Net.open(str(made("qwen2_vl").folder))


def test_fields_that_old_files_leave_out(made: Callable[[str], Made], tmp_path: Path) -> None:
    """LLaVA 1.5's and Gemma 3's text_config name few sizes; Qwen2-VL's first files are flat."""
    short = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    clip = {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14}  # fmt: skip
    folder = tmp_path / "llava"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": short, "vision_config": clip})
    )
    found = describe(str(folder), "dummy")
    assert (found.spec.hidden, found.spec.intermediate, found.spec.vocab_size) == (4096, 11008, 32064)
    assert found.vision is not None and found.vision.tower.layers == 23 and found.vision.tower.max_position == 577
    shutil.copytree(made("qwen2_vl").folder, tmp_path / "flat")
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    del text["rope_parameters"]
    flat = text | config | {"model_type": "qwen2_vl", "rope_scaling": rope, "rope_theta": 1e6}
    (tmp_path / "flat" / "config.json").write_text(json.dumps(flat))
    assert describe(str(tmp_path / "flat")).spec == describe(str(made("qwen2_vl").folder)).spec


def test_a_picture_that_was_not_prepared_for_the_tower_is_refused(made: Callable[[str], Made]) -> None:
    model = made("gemma3").load(BACKENDS[-1])
    with pytest.raises(ValueError, match="the tower makes 4 rows of a picture that has 3 in the prompt"):
        see(model, picture((1, 32, 32), (32, 32), 3))
    with pytest.raises(ValueError, match="4 x 8 patches, the tower has positions of 4 x 4"):
        see(model, picture((1, 32, 64), (32, 64), 8))
    model = made("qwen2_vl").load(BACKENDS[-1])
    with pytest.raises(ValueError, match="are not squares of 2 x 2"):
        see(model, picture((1, 32, 40), (32, 40), 5))


def test_each_model_type_has_a_folder_in_the_tests() -> None:
    assert {family_of(name) for name in FAMILIES} == set(PICTURED)
    assert len(PINPOINTS) > 4 and {name for name, _, _ in CASES} == set(FAMILIES)
