"""`quire compress` from a recipe to a folder that is served."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from net_checks import made, recipe
from oracle import write
from quire.cli.app import app
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.compress.pipelines.methods import RUNNERS
from quire.compress.pipelines.recipe_runner import calibration_text, compress
from quire.compress.prune.masks import Pattern, sparsity_of
from quire.compress.recipes.gguf_formats import FORMATS
from quire.compress.recipes.parser import recipe_of
from quire.compress.recipes.stages import METHODS
from quire.core.errors import ConfigError, ModelError
from quire.engine.llm import LLM
from quire.gguf.file import GgufFile
from quire.model.describe import describe
from quire.model.disk.checkpoint import resolve
from speculation_methods import PYDOC

TOKENS = torch.tensor([[9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17]])


def logits(folder: str | Path) -> torch.Tensor:
    with torch.no_grad():
        return Net.open(str(folder)).logits(TOKENS)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stage", "layout", "most"),
    [
        ({"kind": "quantize", "method": "gptq", "group_size": 32}, "auto", 0.15),
        ({"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 32}, "auto", 0.02),
        ({"kind": "quantize", "method": "rtn", "symmetric": False, "group_size": 32}, "gptq_v2", 0.2),
        ({"kind": "quantize", "method": "rtn", "group_size": 64}, "gptq", 0.25),
        ({"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 64}, "dense", 0.02),
        ({"kind": "quantize", "method": "awq", "group_size": 32}, "auto", 0.15),
        ({"kind": "quantize", "method": "smoothquant"}, "auto", 0.05),
        ({"kind": "quantize", "method": "llm_int8"}, "auto", 0.03),
        ({"kind": "quantize", "method": "fp8"}, "auto", 0.1),
        ({"kind": "quantize", "method": "fp8", "scales": "static"}, "auto", 0.1),
        ({"kind": "quantize", "method": "fp8", "scales": "block"}, "auto", 0.1),
        ({"kind": "quantize", "method": "nf4"}, "auto", 0.2),
        ({"kind": "quantize", "method": "mxfp4"}, "auto", 0.3),
        pytest.param(
            {"kind": "quantize", "method": "mixed", "bits_per_weight": 4.5, "choices": [4, 8], "group_size": 32},
            "auto",
            0.3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_quantized_is_near(stage: dict[str, object], layout: str, most: float, tmp_path: Path) -> None:
    found = distance(logits(made(tmp_path / "out", stage, layout=layout)), logits(PYDOC))
    assert 1e-4 < found < most


@pytest.mark.parametrize(
    "stage",
    [
        *({"kind": "quantize", "method": method} for method in ("rtn", "llm_int8", "fp8", "nf4", "mxfp4", "gptq")),
        {"kind": "prune", "method": "magnitude", "pattern": "2:4"},
        {"kind": "prune", "method": "wanda", "pattern": "2:4"},
    ],
)
def test_text_is_read_only_where_it_is_looked_at(
    stage: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("text is read")

    monkeypatch.setattr("quire.compress.pipelines.recipe_runner.calibration_text", refuse)
    asked = {**stage, "targets": ["*layers.0.*q_proj*"]}
    if stage["method"] in ("gptq", "wanda"):
        with pytest.raises(ConfigError, match="text is read"):
            made(tmp_path / "out", asked)
        return
    made(tmp_path / "out", asked)
    given = recipe_of({"calibration": {"files": ["notes.txt"]}, "stage": [asked]}, "test")
    with pytest.raises(ConfigError, match="text is read"):  # what is wrong with a user's file is told
        compress(PYDOC, tmp_path / "other", given, lambda what: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_bitsandbytes_say_the_dtype_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its reader rounds what it makes of codes to that: of a float32 model 0.4 % of a number would be lost."""
    net = Net.open(PYDOC)
    write_folder(tmp_path / "in", net.tensors, net.config, net.folder, dtype)
    asked = {"kind": "quantize", "method": "nf4", "targets": ["*layers.0.*q_proj*"]}
    out = made(tmp_path / "out", asked, source=str(tmp_path / "in"))
    name = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(load_file(out / "model.safetensors")[name].tolist()))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {state["dtype"], config["bnb_4bit_compute_dtype"]} == {str(dtype).removeprefix("torch.")}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_what_is_pruned_has_its_zeros(method: str, tmp_path: Path) -> None:
    out = made(tmp_path / "out", {"kind": "prune", "method": method, "pattern": "2:4", "ignore": ["*down_proj"]})
    kept = load_file(out / "model.safetensors")
    source = load_file(Path(PYDOC) / "model.safetensors")
    assert sorted(kept) == sorted(source)
    for name, tensor in kept.items():
        assert tensor.dtype == source[name].dtype
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            assert Pattern(2, 4).holds(tensor) and sparsity_of(tensor) >= 0.5
        elif "down_proj" in name or "norm" in name or "embed" in name:
            assert torch.equal(tensor, source[name])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("score", ["magnitude", "activation", "gradient", "influence"])
def test_parts_are_taken_out(score: str, tmp_path: Path) -> None:
    asked = {"kind": "prune", "method": "structured", "score": score, "layers": 1}
    parts = {} if score == "influence" else {"heads": 0.5, "channels": 0.25}
    spec = Net.open(str(made(tmp_path / "out", asked | parts))).spec
    assert spec.layers == 5 and spec.hidden == 256
    assert (spec.heads, spec.kv_heads, spec.intermediate) == ((4, 2, 512) if parts else (8, 4, 704))
    want = logits(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert distance(model(TOKENS).logits, want) < 1e-4


def test_heads_that_transformers_refuses_are_refused_before_text_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "quire.compress.pipelines.recipe_runner.calibration_text", lambda *_: pytest.fail("text is read")
    )
    with pytest.raises(ConfigError, match=r"of which 6 would be left; leave 4 \(heads = 0.5\)"):
        made(tmp_path / "out", {"kind": "prune", "method": "structured", "heads": 0.25})


def test_the_layer_that_goes_is_the_one_that_does_least(tmp_path: Path) -> None:
    """A layer that adds nothing turns no row."""
    net = Net.open(PYDOC)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        net.tensors.writable(f"model.layers.2.{name}.weight").zero_()
    write_folder(tmp_path / "idle", net.tensors, net.config, net.folder, torch.float32)
    asked = {"kind": "prune", "method": "structured", "score": "influence", "layers": 1}
    compress(str(tmp_path / "idle"), tmp_path / "out", recipe(asked), lambda what: None)
    assert distance(logits(tmp_path / "out"), logits(tmp_path / "idle")) < 1e-6


@pytest.mark.slow
def test_stages_follow_each_other_and_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    stages = (
        {"kind": "prune", "method": "wanda", "sparsity": 0.3},
        {"kind": "quantize", "method": "gptq", "group_size": 32},
    )
    whole = made(tmp_path / "whole", *stages)
    told = 0

    def stop(what: str) -> None:
        nonlocal told
        told += 1
        if told in (2, 9):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compress(PYDOC, tmp_path / "cut", recipe(*stages), stop)
        assert not (tmp_path / "cut").exists()
    with pytest.raises(ConfigError, match="another recipe"):
        compress(PYDOC, tmp_path / "cut", recipe(stages[0]), stop)
    compress(PYDOC, tmp_path / "cut", recipe(*stages), stop)
    assert told == 2 + 7 + 6, "layers that were done are told again, stages that were are not"
    with torch.no_grad():
        down = Net.open(str(whole)).tensors["model.layers.3.mlp.down_proj.weight"]
    assert 0.29 < sparsity_of(down) < 0.5, "pruned numbers stay so"
    for path in whole.iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_every_method_of_a_recipe_is_run() -> None:
    assert {(kind, method) for kind, methods in METHODS.items() for method in methods} == set(RUNNERS)


LEARNS = {"steps": 3, "batch": 2, "length": 32, "data": ["text"]}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "stages",
    [
        [{"kind": "prune", "method": "wanda", "pattern": "2:4"}, {"kind": "recover", "method": "full"}],
        [{"kind": "recover", "method": "lora", "rank": 2}],
        [{"kind": "train", "method": "lora", "rank": 2}, {"kind": "merge", "method": "lora"}],
        [{"kind": "train", "method": "qat", "group_size": 32}],
        [{"kind": "distil", "method": "logits", "student": {"layers": 2}}],
        [{"kind": "prune", "method": "structured", "layers": 3}, {"kind": "distil", "method": "hidden"}],
    ],
)
def test_stages_that_learn(stages: list[dict[str, object]], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((Path(sysconfig.get_paths()["stdlib"]) / "bisect.py").read_text())
    known = {"recover", "train", "distil"}
    asked = [stage | (LEARNS | {"data": [str(text)]} if stage["kind"] in known else {}) for stage in stages]
    out = made(tmp_path / "out", *asked)
    assert logits(out).isfinite().all()
    if stages[0].get("pattern"):
        assert Pattern(2, 4).holds(Net.open(str(out)).tensors["model.layers.1.mlp.up_proj.weight"])
    if "student" in stages[0]:
        assert Net.open(str(out)).spec.layers == 2
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize(("kv", "largest"), [("fp8", 448.0), ("int8", 127.0)])
def test_scales_of_keys_and_values_are_those_of_the_text(kv: str, largest: float, tmp_path: Path) -> None:
    stage = {"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 32, "kv": kv}
    tensors = load_file(made(tmp_path / "out", stage) / "model.safetensors")
    source = resolve(PYDOC)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor(calibration_text(source, recipe(stage)).tokens), use_cache=True).past_key_values
    for i, layer in enumerate(cache.layers):
        for name, values in (("k", layer.keys), ("v", layer.values)):
            scale = tensors[f"model.layers.{i}.self_attn.{name}_scale"]
            assert scale.shape == (1,) and float(scale) == pytest.approx(float(values.abs().max()) / largest, rel=0.05)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"][
        "type"
    ] == ("float" if kv == "fp8" else "int")
    with LLM(str(tmp_path / "out"), kv_cache_dtype=kv) as llm:
        assert llm.generate(["def "])[0].outputs[0].text
    with pytest.raises(ConfigError, match="only the last stage in output"):
        made(tmp_path / "other", stage, layout="gptq")
    assert not (tmp_path / "other").exists()


def test_an_adapter_is_a_result_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\n" * 200)
    stage = {"kind": "train", "method": "lora", "rank": 2} | LEARNS | {"data": [str(tmp_path / "text.txt")]}
    out = made(tmp_path / "out", stage)
    assert (out / "adapter_config.json").is_file() and not (out / "config.json").exists()


def test_a_gguf_file_is_written(tmp_path: Path) -> None:
    """It is called by the model and its format, whatever a stage before called its folder."""
    stages: tuple[dict[str, object], ...] = ({"kind": "quantize", "method": "gguf", "format": "Q8_0"},)
    rounded: dict[str, object] = {"kind": "quantize", "method": "rtn", "bits": 8, "targets": ["*layers.0.*q_proj*"]}
    for source, earlier in ((PYDOC, ()), ("", ()), ("pydoc", (rounded,))):
        out = made(tmp_path / f"out {source[:1]}{len(earlier)}", *earlier, *stages, source=source)
        assert [path.name for path in out.iterdir()] == ["pydoc-Q8_0.gguf"]
        file = out / "pydoc-Q8_0.gguf"
        assert GgufFile(file).metadata["general.name"] == "pydoc"
        assert describe(str(file)).name == "pydoc-Q8_0"
        assert distance(logits(file), logits(PYDOC)) < 0.02
    with pytest.raises(ConfigError, match="no stage can follow it"):
        recipe({"kind": "quantize", "method": "gguf"}, {"kind": "prune", "method": "wanda", "sparsity": 0.5})


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["compress", *words])


def test_the_command(tmp_path: Path) -> None:
    sets = ["--set", "bits=8", "--set", "group-size=32", "--set", "output.layout=compressed-tensors"]
    sets += ["--set", "calibration.samples=4", "--set", "calibration.length=32", "--no-passport"]
    result = run("pydoc", str(tmp_path / "out"), "--quantize", "rtn", *sets)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'out'}: " in result.output and " MiB" in result.output
    assert distance(logits(tmp_path / "out"), logits(PYDOC)) < 0.02


@pytest.mark.parametrize(
    ("words", "file", "note"),
    [
        (["q4_k_m"], "pydoc-Q4_K.gguf", "Q4_K_M: all matrices are written as Q4_K"),
        (["gguf", "--set", "format=q8_0"], "pydoc-Q8_0.gguf", ""),
    ],
)
def test_a_format_of_llama_cpp_is_a_gguf_file(words: list[str], file: str, note: str, tmp_path: Path) -> None:
    result = run("pydoc", str(tmp_path / "out"), "--no-passport", "--quantize", *words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / file).is_file()
    assert note in result.output and bool(note) == ("all matrices" in result.output)


def test_a_model_that_transformers_runs_is_told_from_one_that_nothing_runs(tmp_path: Path) -> None:
    write(tmp_path / "in", "diffllama")
    for how in ("rtn", "q4_k"):
        result = run(str(tmp_path / "in"), str(tmp_path / "out"), "--quantize", how)
        assert isinstance(result.exception, ModelError)
        assert "'diffllama' runs by the code of transformers" in str(result.exception)


def test_help_names_the_methods_and_formats() -> None:
    told = run("--help").output
    for name in (*METHODS["quantize"], *FORMATS, *METHODS["prune"]):
        assert re.search(rf"\b{name}\b", told), name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give one of --recipe FILE, --quantize METHOD, --prune METHOD and --frontier FILE"),
        (["--quantize", "rtn", "--prune", "wanda"], "give one of"),
        (["--quantize", "rounding"], "'rounding' is not one of rtn, gptq, "),
        (["--quantize", "IQ2_XS"], ", gguf, nor a format of GGUF files: F16, BF16, Q8_0, "),
        (["--quantize", "Q4_K", "--set", "format=Q5_K"], "Q5_K and Q4_K differ; give one"),
        (["--quantize", "gguf", "--set", "format=Q9"], "'Q9' is not one of F16, "),
        (["--quantize", "rtn", "--set", "bits"], "NAME=VALUE is needed"),
        (["--quantize", "rtn", "--set", "bit=4"], "is it bits?"),
        (["--quantize", "rtn", "--set", "bits=5"], "is not one of 2, 3, 4, 8"),
        (["--prune", "wanda", "--set", "sparsity=0.5", "--set", "calibration.files=nowhere.txt"], "nowhere.txt"),
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
        (["--frontier", "nowhere.toml"], "nowhere.toml"),
        (["--frontier", "a.toml", "--quantize", "rtn"], "--frontier stands alone"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], reason: str, tmp_path: Path) -> None:
    result = run("pydoc", str(tmp_path / "out"), *words)
    assert isinstance(result.exception, ConfigError) and reason in str(result.exception)
    assert "\n" not in str(result.exception) and not list(tmp_path.iterdir())
