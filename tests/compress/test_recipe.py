"""Recipes: what a file says becomes stages, and each mistake one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from quire.compress.recipes.parser import TABLES, Calibration, Recipe, read_recipe, recipe_of, stage_from_flags
from quire.compress.recipes.stages import METHODS, Gptq, Mixed, Prune, Stage, Structured, Student
from quire.core.errors import ConfigError

WHOLE = """
[calibration]
files = ["a.txt", "b.jsonl"]
samples = 128
chat = true

[output]
layout = "gptq"

[[stage]]
kind = "prune"
method = "wanda"
pattern = "2:4"

[[stage]]
kind = "quantize"
method = "gptq"
bits = 4
group_size = 128
ignore = ["*.down_proj.*"]

[[stage]]
kind = "distil"
method = "logits"
temperature = 2
student = { layers = 3 }
"""


def of(text: str) -> Recipe:
    return recipe_of(tomllib.loads(text), "R.toml")


def test_a_file_becomes_stages(tmp_path: Path) -> None:
    path = tmp_path / "R.toml"
    path.write_text(WHOLE)
    recipe = read_recipe(path)
    assert recipe.calibration == Calibration(files=("a.txt", "b.jsonl"), samples=128, chat=True)
    assert recipe.output.layout == "gptq"
    first, second, third = recipe.stages
    assert first == Prune(kind="prune", method="wanda", pattern="2:4")
    assert second == Gptq(kind="quantize", method="gptq", ignore=("*.down_proj.*",))
    assert getattr(third, "student", None) == Student(layers=3) and getattr(third, "temperature", 0) == 2.0


def test_globs_say_which_tensors() -> None:
    stage = Gptq(kind="quantize", method="gptq", targets=("*.mlp.*", "*q_proj*"), ignore=("*layers.0.*",))
    names = [f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("mlp.up_proj", "self_attn.q_proj")]
    assert [stage.covers(name) for name in names] == [False, False, True, True]
    assert not Gptq(kind="quantize", method="gptq").covers("lm_head.weight"), "unless it is asked for"


@pytest.mark.parametrize(("kind", "method"), [(k, m) for k, methods in METHODS.items() for m in methods])
def test_every_method_has_a_short_form_and_a_table(kind: str, method: str) -> None:
    """Values as text and as TOML give one stage; a value of each field's default is taken back."""
    needed = {"wanda": {"sparsity": "0.5"}, "magnitude": {"sparsity": "0.5"}, "sparsegpt": {"pattern": "4:8"},
              "structured": {"layers": "2"}, "mixed": {"bits_per_weight": "4.5"}}.get(method, {})  # fmt: skip
    if kind == "merge":
        needed = {"adapter": "folder"}
    stage = stage_from_flags(kind, method, needed)
    assert (stage.kind, stage.method) == (kind, method) and type(stage) is METHODS[kind][method]
    given = {k: v for k, v in msgspec.to_builtins(stage).items() if v is not None}
    assert recipe_of({"stage": [given]}, "R").stages == (stage,)
    flags = {k: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v) for k, v in given.items()}
    assert stage_from_flags(kind, method, {k: v for k, v in flags.items() if k not in ("kind", "method")}) == stage


def test_the_short_form_reads_words() -> None:
    asked = {"bits": "3", "act_order": "false", "damping": "0.1", "targets": "*q_proj*,*k_proj*"}
    wanted = Gptq(
        kind="quantize", method="gptq", bits=3, act_order=False, damping=0.1, targets=("*q_proj*", "*k_proj*")
    )
    assert stage_from_flags("quantize", "gptq", asked) == wanted
    mixed = stage_from_flags("quantize", "mixed", {"bits_per_weight": "5", "choices": "4,8"})
    assert mixed == Mixed(kind="quantize", method="mixed", bits_per_weight=5.0, choices=(4, 8))


def test_digests_are_of_what_is_meant() -> None:
    short, long = '[[stage]]\nkind = "quantize"\nmethod = "gptq"\n', "bits = 4\ngroup_size = 128\n"
    assert of(short).digest == of(short + long).digest
    others = {of(short + more).digest for more in ("", "bits = 3", "act_order = false", 'ignore = ["*"]')}
    others |= {of("[calibration]\nseed = 1\n" + short).digest, of(short.replace("gptq", "awq")).digest}
    assert len(others) == 6
    a, b = (of(f'{short}[[stage]]\nkind = "prune"\nmethod = "{m}"\nsparsity = 0.5') for m in ("wanda", "magnitude"))
    assert a.digest != b.digest


QUANTIZE = '[[stage]]\nkind = "quantize"\nmethod = "gptq"\n'
PRUNE = '[[stage]]\nkind = "prune"\nmethod = "wanda"\n'
DISTIL = '[[stage]]\nkind = "distil"\nmethod = "hidden"\n'
MISTAKES = {
    "": "R.toml: there is no stage",
    "[stage]\nkind = 'prune'": r"R.toml: stage: a list of tables is needed, each below a line \[\[stage\]\]",
    "[calibrate]\n": r"R.toml: calibrate: there is no such table; is it calibration\?",
    "[zzz]\n": "R.toml: zzz: there is no such table; known are source, calibration, output, stage",
    "calibration = 3\n" + QUANTIZE: r"R.toml: calibration: a table \[calibration\] is needed, not 3",
    "[calibration]\nsample = 3\n" + QUANTIZE: r"\[calibration\]: sample: there is no such key; is it samples\?",
    "[calibration]\nsamples = 0\n" + QUANTIZE: r"\[calibration\]: samples 0 must be at least 1$",
    "[calibration]\nfiles = 'a'\n" + QUANTIZE: r"\[calibration\]: files 'a' must be a list$",
    "[output]\nlayout = 'onnx'\n" + QUANTIZE: r"layout 'onnx' is not one of auto, dense, .*bitsandbytes$",
    "[[stage]]\nmethod = 'gptq'": "stage 1: kind is missing; it is one of quantize, prune, distil, train, merge",
    "[[stage]]\nkind = 'quantise'": "stage 1: kind: 'quantise' is not one of quantize, prune",
    "[[stage]]\nkind = 'prune'": "stage 1: method is missing; it is one of magnitude, wanda",
    PRUNE.replace("wanda", "gptq"): "stage 1: method of prune: 'gptq' is not one of magnitude, wanda",
    QUANTIZE + "bit = 4": r"stage 1 \(quantize gptq\): bit: there is no such key; is it bits\?",
    QUANTIZE + "bits = 5": "bits 5 is not one of 2, 3, 4, 8$",
    QUANTIZE + "bits = '4'": "bits '4' is not one of 2, 3, 4, 8$",
    QUANTIZE + "damping = 0.0": "damping 0.0 must be more than 0$",
    QUANTIZE + "damping = inf": "damping inf is not a number that can be used$",
    QUANTIZE + "damping = nan": "damping nan is not a number that can be used$",
    QUANTIZE + "act_order = 1": "act_order 1 must be true or false$",
    QUANTIZE + "targets = [1]": r"targets 1 must be text$",
    QUANTIZE + PRUNE: r"stage 2 \(prune wanda\): give one of sparsity \(as 0.5\) and pattern",
    PRUNE + "sparsity = 0.5\npattern = '2:4'": r"stage 1 \(prune wanda\): give one of sparsity",
    PRUNE + "sparsity = 1.0": r"sparsity 1.0 must lie in \[0, 1\)$",
    PRUNE.replace("wanda", "structured"): "nothing is taken out",
    PRUNE.replace("wanda", "structured") + "heads = 0.5\nscore = 'influence'": "is of whole layers",
    QUANTIZE.replace("gptq", "mixed"): r"stage 1 \(quantize mixed\): bits_per_weight is missing$",
    QUANTIZE.replace("gptq", "mixed") + "bits_per_weight = 9": "bits_per_weight = 9 is not within choices",
    DISTIL + "student = { layer = 2 }": r"student: layer: there is no such key; is it layers\?",
    DISTIL + "student = { layers = 0 }": "student: layers 0 must be at least 1$",
    "[output]\nlayout = 'compressed-tensors'\n" + QUANTIZE + "static_groups = false": (
        r"stage 1 \(quantize gptq\): layout compressed-tensors holds no groups in the order of .*; set static_groups = "
        "true, or write layout gptq$"
    ),
    "[[stage]]\nkind='merge'\nmethod='lora'": r"stage 1 \(merge lora\): no stage before it trains an adapter",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[text]) as found:
        of(text)
    assert "\n" not in str(found.value) and str(found.value).startswith("R.toml")


def test_mistakes_of_flags_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize gptq: bit: there is no such option; is it bits\?"):
        stage_from_flags("quantize", "gptq", {"bit": "4"})
    with pytest.raises(ConfigError, match="quantize gptq: bits 'four' is not one of 2, 3, 4, 8"):
        stage_from_flags("quantize", "gptq", {"bits": "four"})
    with pytest.raises(ConfigError, match="method of quantize: 'gtpq' is not one of rtn"):
        stage_from_flags("quantize", "gtpq", {})
    with pytest.raises(ConfigError, match="none: No such file"):
        read_recipe(tmp_path / "none")
    for data in (b"\xff\xfe", b"[[stage", b"a = " + b"[" * 5000):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(ConfigError, match="bad: is not TOML"):
            read_recipe(tmp_path / "bad")


def test_an_adapter_that_was_trained_is_merged() -> None:
    recipe = of("[[stage]]\nkind='train'\nmethod='qlora'\n[[stage]]\nkind='merge'\nmethod='lora'")
    assert [stage.kind for stage in recipe.stages] == ["train", "merge"]


def test_tables_and_stages_say_what_they_are() -> None:
    structs: list[type] = [*TABLES.values(), *(s for methods in METHODS.values() for s in methods.values())]
    assert all(struct.__doc__ for struct in structs) and issubclass(Structured, Stage)
