"""Checkpoints that keep matrices in several formats, or codes of 2, 3, 5, 6 and 7 bits; what their rules may be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foreign_weights as foreign
from oracle import BACKENDS, edit_config, logits, relative_error
from paged_model import Paged, prompt
from quantized_checkpoints import (
    BF16,
    F16,
    F32,
    REFUSED,
    Format,
    awq,
    compressed,
    float8,
    gptq,
    load,
    normal,
    scheme_of,
)
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.model.load.packed_writing import finish_all
from quire.quant.rules import LONGEST, compiled
from torch_weights import load_torch

Convert = Callable[[Tensor], tuple[foreign.Parts, Tensor]]
ODD = (2, 3, 5, 6, 7)


def stream(values: Tensor, bits: int) -> Tensor:
    """Unsigned values [r, c] as int32 [r, ceil(c * bits / 32)]: value i from bit i * bits on."""
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * i) for i, value in enumerate(row))
        rows.append([(number >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))])
    out = torch.tensor(rows, dtype=torch.int64)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def planes(values: Tensor, bits: int) -> Tensor:
    """As gptqmodel's planar layout: of 32 values the lowest 4 (or 2) bits, then the rest, 2 and 1 at a time."""
    widths = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]
    blocks, at, out = values.view(len(values), -1, 32), 0, []
    for width in widths:
        plane = blocks >> at & (1 << width) - 1
        out.append(stream(plane.flatten(0, 1), width).view(*blocks.shape[:2], width))
        at += width
    return torch.cat(out, -1).flatten(1)


def odd_gptq(bits: int, form: str, symmetric: bool, group: int = 32) -> Format:
    """gptqmodel's layouts: a stream of 2 and 3 bits, planes of more, and of 3 in "gptq_p"."""
    layout = planes if bits > 4 or (form == "gptq_p" and bits == 3) else stream

    def pack(codes: Tensor, zeros: Tensor, scales: Tensor) -> foreign.Parts:
        parts = foreign.gptq(4, group)(codes % 16, zeros % 16, scales)
        less = (zeros.t() - int(form == "gptq")) % (1 << bits)
        return parts | {"qweight": layout(codes, bits).t().contiguous(), "qzeros": layout(less, bits)}

    return replace(gptq(bits, group, symmetric, form), pack=pack)


def odd_packed(bits: int, group: int, symmetric: bool, whole_words: bool = False) -> Format:
    """compressed-tensors' pack-quantized; `whole_words`: as its older versions fill words."""
    layout = foreign.words if whole_words else stream

    def pack(codes: Tensor, zeros: Tensor, scales: Tensor) -> foreign.Parts:
        parts = {
            "weight_packed": layout(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        return parts if symmetric else parts | {"weight_zero_point": layout(zeros.t(), bits).t().contiguous()}

    return replace(compressed("pack-quantized", bits, group, symmetric, BF16), pack=pack)


STREAMS = [
    *(odd_gptq(bits, "gptq", symmetric) for bits in ODD for symmetric in (True, False) if bits != 2 or symmetric),
    *(odd_gptq(bits, "gptq_p", False) for bits in ODD),
    *(odd_packed(bits, 32, symmetric) for bits in ODD for symmetric in (True, False)),
    *(odd_packed(bits, 64, False, whole_words=True) for bits in (3, 5, 6, 7)),
    odd_packed(3, -1, True),
]


@pytest.mark.parametrize("form", STREAMS, ids=lambda f: f"{f.label} {f.symmetric}")
def test_codes_of_any_bits_are_those_that_were_stored(form: Format) -> None:
    codes = foreign.quantize(normal(64), form.bits, form.group, form.symmetric, form.dtype)
    parts, values = form.pack(*codes), foreign.dequantize(*codes)
    scheme = scheme_of(form.config)
    assert scheme.shape({s: tuple(t.shape) for s, t in parts.items()}) == (64, 256)
    weight = load_torch(scheme, parts, F32)
    assert torch.equal(weight.dequantize(), values)
    kind = "int4" if form.bits < 4 else "int8"
    assert weight.weight.kind == kind and scheme.bits_per_number == int(kind[3:]) + weight_overhead(form)


def weight_overhead(form: Format) -> float:
    """Bits of scales and zeros a number."""
    return (16 + 8 * (not form.symmetric)) / (128 if form.group == -1 else form.group)


def test_older_words_that_do_not_fit_their_codes_are_refused() -> None:
    form = odd_packed(3, 32, True)
    parts, _ = form.convert(normal())
    with pytest.raises(ModelError, match=r"weight_shape is \[48, 256\], weight_packed holds"):
        load_torch(scheme_of(form.config), parts | {"weight_packed": parts["weight_packed"][:, :-1]}, F32)


def mxfp6(w: Tensor) -> tuple[foreign.Parts, Tensor]:
    """compressed-tensors' MXFP6PackedCompressor: codes of 6 bits, four to three bytes; exponents of two per 32."""
    table = torch.tensor([m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)])
    groups = w.view(len(w), -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    nearest = (scaled.abs()[..., None] - table).abs().argmin(-1)
    values = table[nearest] * scaled.sign() * torch.exp2(exponent)[..., None]
    data = stream((nearest | (scaled < 0).long() << 5).flatten(1), 6).view(torch.uint8)
    return {"weight_packed": data, "weight_scale": (exponent + 127).to(torch.uint8)}, values.flatten(1)


def mxfp8(w: Tensor) -> tuple[foreign.Parts, Tensor]:
    """compressed-tensors' MXFP8QuantizationCompressor: float8 and an exponent of two per 32 columns."""
    groups = w.view(len(w), -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 8
    codes = (groups / torch.exp2(exponent)[..., None]).flatten(1).clamp(-448, 448).to(torch.float8_e4m3fn)
    values = codes.float().view_as(groups) * torch.exp2(exponent)[..., None]
    return {"weight": codes, "weight_scale": (exponent + 127).to(torch.uint8)}, values.flatten(1)


MICRO: dict[str, tuple[Convert, str]] = {
    "mxfp6-pack-quantized": (mxfp6, "int8 g32 a16"),
    "mxfp8-quantized": (mxfp8, "fp8"),
}


@pytest.mark.parametrize("form", MICRO)
def test_micro_scaled_floats(form: str, tmp_path: Path) -> None:
    convert, kind = MICRO[form]
    bits = int(re.sub(r"\D", "", form[:5]))
    config = foreign.compressed_config(form, num_bits=bits, type="float", strategy="group", group_size=32)
    parts, values = convert(normal())
    assert torch.equal(load_torch(scheme_of(config), parts, F32).dequantize(), values)
    oracle = foreign.replace_linears(tmp_path, config, convert)
    for name in BACKENDS:
        (got,) = Paged(load(tmp_path, name, dtype="float32"), [prompt(9, 1)]).run([[9]])
        assert relative_error(got, logits(oracle, prompt(9, 1))) < 3e-4
    kept = load(tmp_path, BACKENDS[-1], dtype="bfloat16").report["down"][0]
    assert kept == ("fp8 g32 a16" if kind == "fp8" else kind)


def rules_of(*forms: tuple[str, Format | None]) -> tuple[dict[str, Any], Callable[[str], Convert | None]]:
    """gptqmodel's `dynamic` and, for each name, what quantizes it; the last form is that of all others."""
    _, base = forms[-1]
    assert base is not None
    dynamic = {
        f"{'-' if form is None else '+'}:{rule}": {} if form is None else {"bits": form.bits, "group_size": form.group}
        for rule, form in forms[:-1]
    }

    def of(name: str) -> Convert | None:
        form = next((form for rule, form in forms if re.match(rule, name)), base)
        return None if form is None else form.convert

    return base.config | {"dynamic": dynamic}, of


def mixed_folder(folder: Path, config: dict[str, Any], of: Callable[[str], Convert | None], head: bool = False) -> Any:
    """A tiny Llama whose matrices are what `of(name)` makes of each; transformers' model with the same numbers."""
    oracle = foreign.replace_linears(folder, config, lambda w: ({"weight": w}, w))
    file, own = folder / "model.safetensors", oracle.state_dict()
    tensors = load_file(file)
    for name in [n for n in own if n.endswith("_proj.weight") or (head and n == "lm_head.weight")]:
        convert = of(name.removesuffix(".weight"))
        if convert is not None:
            parts, values = convert(tensors.pop(name))
            tensors |= {name.removesuffix("weight") + suffix: t.contiguous() for suffix, t in parts.items()}
            own[name].copy_(values)
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(folder, quantization_config=config)
    return oracle


def error_of(folder: Path, oracle: Any, name: str) -> float:
    (got,) = Paged(load(folder, name), [prompt(9, 1)]).run([[9]])
    return relative_error(got, logits(oracle, prompt(9, 1)))


def test_gptq_rules_by_layer_with_a_quantized_head(tmp_path: Path) -> None:
    base, wide, narrow = gptq(4, 128, True, "gptq"), gptq(8, 32, True, "gptq"), odd_gptq(3, "gptq", True)
    head = gptq(8, 64, True, "gptq")
    config, of = rules_of(
        (r".*\.1\..*(k|down)_proj", wide), (r"model\.layers\.0\.self_attn\.o_proj", None), (r".*up_proj", narrow),
        ("lm_head", head), ("", base),
    )  # fmt: skip
    oracle = mixed_folder(tmp_path, config, of, head=True)
    for name in BACKENDS:
        assert error_of(tmp_path, oracle, name) < 3e-4
    report = load(tmp_path, BACKENDS[-1]).report
    assert report["head"][0] == "int8 g64 a16" and {"q", "k", "v"} <= set("+".join(report).split("+"))
    facts = describe(str(tmp_path))
    assert facts.scheme == "gptq int4 g128 + gptq int3 g32 + gptq int8 g32 + gptq int8 g64"
    assert facts.outer_bits["head"] == 8 + 16 / 64
    with pytest.raises(ConfigError, match="quantized already"):
        load(tmp_path, quantization="int4")


def test_awq_rules_and_files_without_zeros(tmp_path: Path) -> None:
    form, coarse = replace(awq(32), symmetric=True), replace(awq(128), symmetric=True)

    def without_zeros(of: Format) -> Convert:
        def convert(w: Tensor) -> tuple[foreign.Parts, Tensor]:
            parts, values = of.convert(w)
            return {name: t for name, t in parts.items() if name != "qzeros"}, values

        return convert

    config = form.config | {"zero_point": False, "dynamic": {r"+:.*mlp.*": {"group_size": 128}}}
    oracle = mixed_folder(tmp_path, config, lambda name: without_zeros(coarse if "mlp" in name else form))
    assert error_of(tmp_path, oracle, BACKENDS[-1]) < 3e-4
    edit_config(tmp_path, quantization_config=config | {"zero_point": True})
    with pytest.raises(ModelError, match=r"missing tensors.*qzeros"):
        load(tmp_path)


def groups_of(**groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with several groups: targets, and the config of one group each."""
    found = {
        name: config["config_groups"]["group_0"] | {"targets": targets, "format": config["format"]}
        for name, (targets, config) in groups.items()
    }
    some = next(iter(groups.values()))[1]
    return some | {"format": "mixed-precision", "config_groups": found}


def fp8_rows(w: Tensor) -> tuple[foreign.Parts, Tensor]:
    codes, scales, values = float8(w, 1, 1 << 20)
    return {"weight": codes, "weight_scale": scales}, values


def test_compressed_tensors_in_several_formats(tmp_path: Path) -> None:
    """Names count before patterns, patterns before kinds of layers; k and v are of 8 bits and differ in activations."""
    four, eight, three = (
        compressed("pack-quantized", 4, 128, True, BF16), compressed("int-quantized", 8, -1, True, BF16),
        odd_packed(3, 32, False),
    )  # fmt: skip
    fp8 = foreign.compressed_config("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
    rounded = groups_of(a=([], eight.config))["config_groups"]["a"] | {"input_activations": {"num_bits": 8}}
    config = groups_of(
        a=(["Linear"], four.config), b=([r"re:.*self_attn\.(k|v)_proj$"], eight.config), c=(["re:.*down_proj"], fp8),
        d=(["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"], three.config),
    )  # fmt: skip
    config["config_groups"]["e"] = rounded | {"targets": ["model.layers.1.self_attn.v_proj"]}

    def of(name: str) -> Convert:
        if name in config["config_groups"]["d"]["targets"]:
            return three.convert
        return fp8_rows if name.endswith("down_proj") else eight.convert if name[-6:-5] in "kv" else four.convert

    oracle = mixed_folder(tmp_path, config, of)
    for name in BACKENDS:
        assert error_of(tmp_path, oracle, name) < 2e-2, "one matrix rounds activations to 8 bits"
    config["config_groups"]["e"]["input_activations"] = None
    edit_config(tmp_path, quantization_config=config)
    for name in BACKENDS:
        assert error_of(tmp_path, oracle, name) < 3e-4
    assert describe(str(tmp_path)).scheme.startswith("compressed-tensors int4 g128 + ")
    config["config_groups"]["a"]["targets"] = ["re:.*mlp.*"]
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelError, match=r"config_groups: no target is model.layers.0.self_attn.o_proj or matches it"):
        load(tmp_path)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native was not built")
def test_the_packed_cache_is_of_one_declaration(tmp_path: Path) -> None:
    """Whether activations are rounded is in config.json alone."""
    form = compressed("int-quantized", 8, -1, True, BF16)
    foreign.replace_linears(tmp_path, form.config, form.convert)
    options = {"cache_packed": str(tmp_path / "kept")}
    assert load(tmp_path, "cpu", **options).report["down"][0] == "int8 g128 a16"
    finish_all()
    form.config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    edit_config(tmp_path, quantization_config=form.config)
    assert load(tmp_path, "cpu", **options).report["down"][0] == "int8 g128"


def test_scales_of_keys_and_values_are_read_past_and_said(tmp_path: Path) -> None:
    form = compressed("pack-quantized", 4, 32, True, F16)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    oracle = foreign.replace_linears(tmp_path, form.config, form.convert)
    file = tmp_path / "model.safetensors"
    scales = {f"model.layers.{i}.self_attn.{n}_scale": torch.tensor([0.02 * (i + 1)]) for i in range(2) for n in "kv"}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no role.*k_scale"):
        load(tmp_path)
    edit_config(tmp_path, quantization_config=form.config | {"kv_cache_scheme": scheme})
    model = load(tmp_path, BACKENDS[-1], kv_cache_dtype="fp8")
    assert any("8 bits (float)" in note and "--kv-cache-dtype fp8" in note for note in model.notes)
    (got,) = Paged(model, [prompt(9, 1)]).run([[9]])
    assert relative_error(got, logits(oracle, prompt(9, 1))) < 0.1
    assert error_of(tmp_path, oracle, BACKENDS[-1]) < 3e-4


@pytest.mark.parametrize(
    "pattern",
    [r".*self_attn\.(q|k|v)_proj$", r"model\.layers\.(0|1[0-9]|2\d)\..*mlp\.(gate|up)_proj.*", r"^(?!.*mlp).*$",
     "lm_head", r".*layers\.\d+\.mlp\.experts\.\d+\..*", r"(?:a|b)?[*+()]x{2}",
     "|".join(["a.*b.*"] * 9)],
)  # fmt: skip
def test_patterns_that_are_read(pattern: str) -> None:
    assert compiled(pattern).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(a+)+$", "several ways"), ("((a*)b)*$", "several ways"), ("(a|aa)+$", "several"), ("(a?){50}", "several"),
     (".*" * 6 + "|a", "6 places"), (r"(a)\1", "back"), ("(?P<x>a)(?P=x)", "back"), ("(", "no regular expression"),
     ("a" * (LONGEST + 1), "characters")],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiled(pattern)
    config = gptq(4, 32, True, "gptq").config | {"dynamic": {f"+:{pattern}": {"bits": 8}}}
    with pytest.raises(ModelError, match="dynamic: the pattern"):
        scheme_of(config)


def test_rules_that_are_refused() -> None:
    config = gptq(4, 32, True, "gptq").config
    for rule, message in (({"bits": 9}, "bits: is 9"), ({"method": "awq"}, "method: is not read here"), (3, "dynamic")):
        with pytest.raises(ModelError, match=message):
            scheme_of(config | {"dynamic": {"+:.*down.*": rule}})
    assert not any("dynamic" in c for c, _ in REFUSED)
