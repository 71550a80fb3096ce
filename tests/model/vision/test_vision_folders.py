"""Folders of models that take images: each tensor of a vision part is claimed, counted, shown, or refused by name."""

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

from family_formats import FILES, on_grid
from often import one_of
from oracle import BACKENDS, backend, edit_config, relative_error
from quire.cli import main
from quire.compress.checkpoint.net import Net
from quire.core.config import flat_config
from quire.core.errors import ModelError
from quire.images.processor_config import image_settings
from quire.model.build import load_model
from quire.model.describe import describe, open_model
from quire.model.families.multimodal import REFUSED
from quire.model.families.text_parts import FLAT
from quire.model.load.adapter_files import read_adapter
from quire.model.load.reader import IN_FILE
from quire.model.load.roles import DISK_ROLES, Share
from quire.model.vision.reading import HALF, Pixels, read_pixels
from quire.ops.choice import choose
from quire.parallel.rank_place import RankPlace
from quire.parallel.topology import Topology
from quire.plan.weights import weight_parts
from vision_models import FAMILIES, write_files
from vision_oracle import QWEN, SHAPES, Made, any_size, see

TOLERANCE = 1e-4
FORMATS = {name: file for name, file in FILES.items() if name != "bitsandbytes"}
"""Of matrices in files of other tools, less the one whose groups are wider than these."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda name: Made(name, tmp_path_factory.mktemp(name)))


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


@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3", "mistral3", "internvl", "lfm2_vl", *QWEN])
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


def test_layers_that_predict_further_tokens_are_left_out(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(made("qwen3_5").folder, folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors, folder / "model.safetensors")
    for options in ({}, {"language_model_only": True}):
        model = load_model(flat_config(model=str(folder), **options), backend(BACKENDS[-1]))
        assert (model.vision is None) == bool(options) and model.spec.layers == 4


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
    said = broken(
        folder, tmp_path / "left", lambda t: t.update({f"{tower}encoder.layers.0.gate.weight": t[fc1].clone()})
    )
    assert f"{tower}encoder.layers.0.gate.weight" in said and "clip_vision_model" in said
    said = broken(folder, tmp_path / "more", lambda t: t.update({linear.replace("_2", "_3"): t[linear].clone()}))
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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_account_counts_the_vision_part(name: str, quantization: str | None, made: Callable[[str], Made]) -> None:
    """To the byte, the decoder's part included."""
    options = {} if quantization is None else {"quantization": quantization}
    config = flat_config(model=str(made(name).folder), device=BACKENDS[-1], **options)
    found, model = describe(config.model.model), made(name).load(BACKENDS[-1], **options)
    assert found.vision is not None and model.vision is not None
    assert model.report["vision"][1] == model.vision.nbytes == 4 * found.vision.parameters
    planned = weight_parts(config, found, choose(config.device))
    assert [part.nbytes for part in planned if part.role == "vision"] == [model.vision.nbytes]
    assert sum(part.nbytes for part in planned) == model.weight_bytes
    if quantization is not None:
        return
    opened = open_model(config.model.model)
    assert opened.vision is not None
    parts = (opened.vision.tower, opened.vision.projector)
    taken = {name for part in parts for names in part.claim.parts.values() for name in names.values()}
    left = sum(i.nbytes for part in parts for name, i in part.source.infos.items() if name not in taken)
    mine = {name for parts in opened.claim.parts.values() for name in parts.values()}
    mapped = {name for role in IN_FILE for name in opened.claim.get(role).values()}
    unread = sum(i.nbytes for name, i in opened.source.infos.items() if name not in mine or name in mapped)
    read = model.weight_bytes - model.report["rope"][1]
    assert read == pytest.approx(found.bytes_on_disk - left - unread, rel=0.01)
    assert (left > 0) == (name in SHORTENED) and (unread > 0) == (name == "gemma4")


def test_one_of_several_ranks_has_the_tower(made: Callable[[str], Made]) -> None:
    config = flat_config(model=str(made("gemma3").folder), device=BACKENDS[-1], tensor_parallel_size=2)
    found, choice = describe(config.model.model), choose(config.device)
    for rank in range(2):
        model = load_model(config, backend(BACKENDS[-1]), place=RankPlace(Topology(tensor=2), rank))
        planned = {part.role: part for part in weight_parts(config, found, choice, Share(rank, 2))}
        assert [model.vision is None, "vision" not in model.report, "vision" not in planned] == [rank > 0] * 3
        assert planned["embed"].nbytes == model.report["head"][1]


SHORTENED = ("llava", "llava_siglip", "llava_next", "llava_onevision")
"""Whose last layers, norm or head nothing reads."""


@pytest.mark.parametrize("format_", FORMATS)
def test_files_with_a_quantized_decoder_keep_the_tower(
    format_: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    folder = made("llava").folder
    config, convert, _ = FORMATS[format_]
    tensors = load_file(folder / "model.safetensors")
    for (role, place), parts in open_model(str(folder)).claim.parts.items():
        if DISK_ROLES[role].kind == "linear" and place.layer is not None:
            name = parts["weight"]
            for suffix, part in convert(on_grid(tensors.pop(name))).items():
                tensors[name.removesuffix("weight") + suffix] = part.contiguous()
    shutil.copytree(folder, tmp_path / "m")
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    edit_config(tmp_path / "m", quantization_config=config)
    shown, want = made("llava").want(SHAPES["llava"][0], (77, 99))
    model = load_model(flat_config(model=str(tmp_path / "m"), dtype="float32"), backend(BACKENDS[-1]))
    assert model.quantization != "none" and relative_error(see(model, shown), want) <= TOLERANCE
    assert describe(str(tmp_path / "m")).vision == describe(str(folder)).vision


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_adapters_name_the_decoder_as_either_writer_does(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    opened, taken = open_model(str(made(name).folder)), [("q", 0), ("q", 1), ("down", 2)]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    found = []
    for way in ("model.language_model.", "language_model.model.", "model."):
        folder = tmp_path / way
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for module, n, k in (("layers.1.self_attn.q_proj", 64, 64), ("layers.2.mlp.down_proj", 64, 96)):
            tensors[f"base_model.model.{way}{module}.lora_A.weight"] = torch.ones(4, k)
            tensors[f"base_model.model.{way}{module}.lora_B.weight"] = torch.ones(n, 4)
        save_file(tensors, folder / "adapter_model.safetensors")
        found.append(set(read_adapter(folder, opened, taken, 8).matrices))
    assert found == [{("q", 1), ("down", 2)}] * 3


def inspected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What `quire inspect` shows, by name."""
    monkeypatch.setattr(sys, "argv", ["quire", "inspect", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    return {name: value.strip() for name, value in rows.items()}


def test_inspect_shows_the_tower(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(made("qwen3_vl").folder)
    shown = inspected(monkeypatch, capsys, folder)
    assert shown["family"] == "qwen3_vl, whose decoder is qwen3"
    assert shown["vision tower"] == "qwen3_vl_vision, 3 layers, hidden 64, intermediate 96, 4 heads of 16"
    assert shown["images"] == "patches of 8 x 8 pixels, 2 x 2 of them one row"
    assert "first 2 layers" in shown["decoder with images"]
    assert shown["vision parameters"].startswith(f"{describe(folder).vision.parameters:,}")
    assert (
        inspected(monkeypatch, capsys, str(made("qwen2_5_vl").folder))["family"] == "qwen2_5_vl, whose decoder is qwen2"
    )
    without = inspected(monkeypatch, capsys, folder, "--language-model-only")
    assert without["weights in memory"] != shown["weights in memory"] and without["family"] == shown["family"]


def test_pixels_are_read_as_the_processor_says(tmp_path: Path) -> None:
    usual = Pixels()
    assert read_pixels(image_settings(tmp_path), usual) == usual
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_mean": 0.5}}))
    assert read_pixels(image_settings(tmp_path), usual) == Pixels(HALF, usual.std)
    write_files("gemma3", tmp_path)
    assert read_pixels(image_settings(tmp_path), usual) == Pixels(HALF, HALF)
    path = tmp_path / "preprocessor_config.json"
    for change, want in (
        ({"do_normalize": False}, Pixels((0.0,) * 3, (1.0,) * 3)),
        ({"do_rescale": False}, Pixels(HALF, HALF, 1.0)),
        ({"rescale_factor": 0.5}, Pixels(HALF, HALF, 0.5)),
    ):
        write_files("gemma3", tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert read_pixels(image_settings(tmp_path), usual) == want
    for wrong in ([0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, 0.0]):
        path.write_text(json.dumps({"image_std": wrong}))
        with pytest.raises(ModelError, match=r"preprocessor_config.json: image_std: is .* needs three numbers"):
            read_pixels(image_settings(tmp_path), usual)


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
        ("vision_config", {"hidden_act": "mish"}, "hidden_act: 'mish' is not known"),
        ("text_config", {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 2, 3]}}, "whose sum is 8"),
    ):
        edit_config(tmp_path / "m", **{part: config[part] | change})
        with pytest.raises(ModelError) as refused:
            describe(str(tmp_path / "m"))
        assert said in str(refused.value)
        edit_config(tmp_path / "m", **config)
    edit_config(tmp_path / "m", vision_config=config["vision_config"] | {"model_type": "eva"})
    found = describe(str(tmp_path / "m"))
    assert found.vision is None and any("only the decoder of 'qwen2_vl' runs" in note for note in found.notes)
    edit_config(tmp_path / "m", **config)
    for model_type, why in REFUSED.items():
        edit_config(tmp_path / "m", model_type=model_type)
        if model_type in FLAT:
            continue  # its config.json is its decoder's
        found = describe(str(tmp_path / "m"))
        assert found.vision is None and any(why in note for note in found.notes)
        edit_config(tmp_path / "m", remove=("text_config",))
        with pytest.raises(ModelError) as refused:
            describe(str(tmp_path / "m"))
        assert f"{model_type!r} is not supported: {why}" in str(refused.value)
        edit_config(tmp_path / "m", **config)
    with pytest.raises(ModelError, match="takes images"):
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
