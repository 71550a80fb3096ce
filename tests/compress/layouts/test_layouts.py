"""Layouts of files: read back bit for bit by the readers, and equal to what other programs' packers write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foreign_weights as foreign
from quire.compress.layouts.base import Layout, is_unquantized, pack
from quire.compress.layouts.bitsandbytes import BitsAndBytesLayout, dynamic_map
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.layouts.gptq import GptqLayout
from quire.compress.layouts.registry import LAYOUTS
from quire.core.errors import ConfigError
from quire.model.disk.hf_config import HfConfig
from quire.ops.arrays import to_numpy
from quire.ops.weights import Weight
from quire.quant.codebook import FP4, MXFP4, NF4
from quire.quant.packed import unpack_rows
from quire.quant.registry import QUANTIZERS, detect, matrix_scheme
from torch_weights import load_torch, quantize_torch

LAYER = "model.layers.0.mlp.up_proj"
QUICK = settings(max_examples=25, deadline=None)


def fields(config: Mapping[str, Any]) -> HfConfig:
    return HfConfig({"quantization_config": config}, "config.json").child("quantization_config")


def read(layout: Layout, matrices: Mapping[str, Weight]) -> dict[str, Tensor]:
    """The numbers of each matrix, as the readers of checkpoints find them in what `layout` writes of all."""
    files = {name: t for base, weight in matrices.items() for name, t in layout.tensors(base, weight).items()}
    scheme = detect(files, fields(layout.config(matrices)), MappingProxyType({}))
    found = {}
    for base in matrices:
        present = {name.removeprefix(f"{base}."): name for name in files if name.startswith(f"{base}.")}
        own = matrix_scheme(scheme, present)
        parts = {suffix: files[name] for suffix, name in present.items()}
        assert parts.keys() <= {*own.parts, *own.optional} and parts.keys() >= own.parts.keys()
        found[base] = load_torch(own, parts, torch.float32).dequantize()
    return found


def random_weight(
    bits: int, n: int, k: int, group: int, zeros: bool = False, order: bool = False, seed: int = 0
) -> Weight:
    """Integers with scales that float16 holds; no zero is the lowest code."""
    g, half = torch.Generator().manual_seed(seed), 1 << (bits - 1)
    codes = torch.randint(-half, half, (n, k), generator=g, dtype=torch.int8)
    codes[0, 0] = -half
    scales = (torch.rand((n, k // group), generator=g) + 0.1).half()
    points = torch.randint(1 - half, half, scales.shape, generator=g, dtype=torch.int8) if zeros else None
    places = torch.randperm(k, generator=g).int() if order else None
    kind = "int4" if bits <= 4 else "int8"
    return Weight(kind, codes, scales, points, group, order=places, activation_bits=16, bits=bits)


def check(layout: Layout, weight: Weight) -> None:
    assert torch.equal(read(layout, {LAYER: weight})[LAYER], weight.dequantize())


@QUICK
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 1 << 30))
def test_packing_is_the_inverse_of_the_readers(bits: int, rows: int, count: int, seed: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    assert np.array_equal(unpack_rows(to_numpy(pack(codes, bits)), bits)[:, :count], codes)


SHAPES = {
    "n": st.sampled_from([32, 64, 96]), "groups": st.integers(1, 4), "group": st.sampled_from([32, 64, 128]),
    "zeros": st.booleans(), "order": st.booleans(), "seed": st.integers(0, 1 << 30),
}  # fmt: skip


@QUICK
@given(bits=st.sampled_from([2, 3, 4, 8]), v2=st.booleans(), **SHAPES)
def test_gptq_is_read_bit_for_bit(
    bits: int, v2: bool, n: int, groups: int, group: int, zeros: bool, order: bool, seed: int
) -> None:
    weight = random_weight(bits, n, groups * group, group, zeros, order, seed)
    check(GptqLayout("gptq_v2" if v2 else "gptq"), weight)


@QUICK
@given(bits=st.sampled_from([2, 3, 4, 8]), **{**SHAPES, "order": st.just(False)})
def test_packed_integers_are_read_bit_for_bit(
    bits: int, n: int, groups: int, group: int, zeros: bool, order: bool, seed: int
) -> None:
    check(LAYOUTS["compressed-tensors"], random_weight(bits, n, groups * group, group, zeros, order, seed))


@QUICK
@given(**{**SHAPES, "order": st.just(False)})
def test_awq_is_read_bit_for_bit(n: int, groups: int, group: int, zeros: bool, order: bool, seed: int) -> None:
    check(LAYOUTS["awq"], random_weight(4, n, groups * group, group, zeros, order, seed))


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("bits", [4, 8])
def test_plain_integers_are_read_bit_for_bit(form: str, bits: int) -> None:
    for group, zeros in ((64, True), (128, False), (256, True)):
        check(CompressedTensorsLayout(form=form), random_weight(bits, 48, 256, group, zeros))


def unsigned(weight: Weight, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zeros and scales as the packers of other programs take them."""
    assert weight.scales is not None
    zeros = torch.zeros(weight.scales.shape) if weight.zeros is None else weight.zeros
    half = 1 << (bits - 1)
    return weight.codes.long() + half, zeros.long() + half, weight.scales


PACKERS: dict[str, tuple[Layout, int, bool, foreign.Packer]] = {
    **{f"gptq {bits}": (GptqLayout(), bits, True, foreign.gptq(bits, 64)) for bits in (2, 4, 8)},
    "gptq_v2": (GptqLayout("gptq_v2"), 4, True, foreign.gptq(4, 64, first=False)),
    "awq": (LAYOUTS["awq"], 4, True, foreign.awq),
    **{f"packed {bits} {zeros}": (CompressedTensorsLayout(), bits, zeros, foreign.packed(bits, not zeros))
       for bits in (4, 8) for zeros in (True, False)},
    **{f"plain {zeros}": (CompressedTensorsLayout(form="int-quantized"), 8, zeros, foreign.plain(8, not zeros))
       for zeros in (True, False)},
}  # fmt: skip


@pytest.mark.parametrize("case", PACKERS)
def test_bytes_are_those_of_other_packers(case: str) -> None:
    layout, bits, zeros, packer = PACKERS[case]
    weight = random_weight(bits, 64, 256, 64, zeros)
    want, got = packer(*unsigned(weight, bits)), layout.tensors(LAYER, weight)
    assert {f"{LAYER}.{part}" for part in want} == got.keys()
    for part, tensor in want.items():
        mine = got[f"{LAYER}.{part}"]
        assert torch.equal(mine, tensor) and mine.dtype == tensor.dtype and mine.is_contiguous(), part


def test_act_order_gives_each_column_its_group() -> None:
    weight = random_weight(4, 32, 128, 32, order=True)
    assert weight.order is not None
    want = torch.empty(128, dtype=torch.int32)
    for place, column in enumerate(weight.order.tolist()):
        want[column] = place // 32
    assert torch.equal(GptqLayout().tensors(LAYER, weight)[f"{LAYER}.g_idx"], want)
    assert GptqLayout().config({LAYER: weight})["desc_act"] is True


def test_the_order_that_compressed_tensors_had_is_still_read() -> None:
    """Files of llm-compressor from before that version of the package."""
    weight, layout = random_weight(4, 32, 128, 32, zeros=True), LAYOUTS["compressed-tensors"]
    index = torch.arange(128, dtype=torch.int32)[torch.randperm(128)] // 32
    parts = {name.removeprefix(f"{LAYER}."): t for name, t in layout.tensors(LAYER, weight).items()}
    config = layout.config({LAYER: weight})
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    parts["weight_g_idx"] = index
    files = {f"{LAYER}.{part}": t for part, t in parts.items()}
    scheme = matrix_scheme(detect(files, fields(config), MappingProxyType({})), dict.fromkeys(parts, ""))
    assert weight.scales is not None and weight.zeros is not None
    numbers = weight.codes.float() - weight.zeros.float()[:, index.long()]
    assert torch.equal(
        load_torch(scheme, parts, torch.float32).dequantize(), numbers * weight.scales.float()[:, index.long()]
    )


def float8(group: int, rows: int, n: int = 256, k: int = 256, equal: bool = False) -> Weight:
    g = torch.Generator().manual_seed(3)
    codes = (torch.randn((n, k), generator=g) * 50).to(torch.float8_e4m3fn)
    scales = (torch.rand((-(-n // rows), k // group), generator=g) + 0.1).repeat_interleave(rows, 0)[:n].contiguous()
    return Weight("fp8", codes, torch.full_like(scales, 0.125) if equal else scales, group=group)


@pytest.mark.parametrize("form", ["", "naive-quantized"])
@pytest.mark.parametrize(
    ("weight", "strategy", "shape"),
    [
        (float8(256, 1), "channel", [256, 1]),
        (float8(256, 1, equal=True), "tensor", [1]),
        (float8(128, 128), "block", [2, 2]),
        (float8(128, 128, n=200), "block", [2, 2]),
        (float8(64, 1), "block", [256, 4]),
    ],
)
def test_float8(form: str, weight: Weight, strategy: str, shape: list[int]) -> None:
    layout = CompressedTensorsLayout(form=form)
    got = read(layout, {LAYER: weight})[LAYER]
    assert torch.equal(got, weight.dequantize())
    assert list(layout.tensors(LAYER, weight)[f"{LAYER}.weight_scale"].shape) == shape
    group = layout.config({LAYER: weight})["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == strategy and group["input_activations"]["dynamic"] is True
    fixed = replace(layout, input_scales={LAYER: torch.tensor([0.5])})
    assert fixed.config({LAYER: weight})["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    assert fixed.tensors(LAYER, weight)[f"{LAYER}.input_scale"] == 0.5
    assert torch.equal(read(fixed, {LAYER: weight})[LAYER], got)


def test_w8a8_is_plain_and_other_int8_is_packed() -> None:
    weight = quantize_torch(QUANTIZERS["int8"], torch.randn(32, 128), 128).weight
    config = CompressedTensorsLayout().config({LAYER: weight})
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    check(CompressedTensorsLayout(), weight)
    alone = replace(weight, activation_bits=16)
    config = CompressedTensorsLayout().config({LAYER: alone})
    assert config["format"] == "pack-quantized" and config["config_groups"]["group_0"]["input_activations"] is None


@pytest.mark.parametrize("group", [32, 64])
def test_mxfp4(group: int) -> None:
    w = torch.randn(16, 128)
    w[2, :64] = 0
    check(CompressedTensorsLayout(), quantize_torch(MXFP4, w, group).weight)
    uneven = replace(quantize_torch(MXFP4, w, group).weight, scales=torch.full((16, 128 // group), 0.3))
    with pytest.raises(ConfigError, match="no powers of two"):
        CompressedTensorsLayout().tensors(LAYER, uneven)


def sparse(w: Tensor, halves: bool) -> Tensor:
    """`w` with two of every four numbers left, or about a third of all; some more are 0."""
    if halves:
        w = w * torch.zeros(w.numel() // 4, 4).scatter_(1, w.abs().view(-1, 4).topk(2).indices, 1).view(w.shape)
    else:
        w = w * (torch.rand_like(w) < 0.35)
    w[0, :8] = 0
    return w


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask"])
def test_sparse_matrices(form: str) -> None:
    torch.manual_seed(5)
    layout, w = CompressedTensorsLayout(sparsity=form), sparse(torch.randn(48, 128), form == "sparse-24-bitmask")
    dense = Weight("bf16", w.bfloat16())
    float8_codes = (w * 20).to(torch.float8_e4m3fn)
    float8_codes.view(torch.int8)[float8_codes.float() == 0] = 0
    eight = Weight("fp8", float8_codes, torch.rand(48, 1) + 0.5, group=128)
    whole = quantize_torch(QUANTIZERS["int8"], w, 128).weight
    for weight in (dense, eight, whole):
        parts = layout.tensors(LAYER, weight)
        assert f"{LAYER}.weight" not in parts
        check(layout, weight)
        kept = parts[f"{LAYER}.compressed"].numel()
        assert kept == w.numel() // 2 if form == "sparse-24-bitmask" else kept <= int((w != 0).sum())
        mask = np.unpackbits(parts[f"{LAYER}.bitmask"].numpy(), axis=-1, bitorder="little").astype(bool)
        assert (mask | (weight.dequantize().numpy() == 0)).all()
    full = {LAYER: dense, "lm_head": Weight("bf16", torch.randn(8, 16).bfloat16())}
    assert layout.config(full)["sparsity_config"]["ignore"] == ["lm_head"]
    assert torch.equal(read(layout, full)["lm_head"], full["lm_head"].codes.float())
    with pytest.raises(ConfigError, match="cannot be sparse"):
        layout.tensors(LAYER, replace(eight, codes=torch.ones(48, 128).to(torch.float8_e4m3fn)))


def test_llm_int8() -> None:
    weight = quantize_torch(QUANTIZERS["int8"], torch.randn(32, 128), 128).weight
    check(LAYOUTS["bitsandbytes"], weight)
    config = LAYOUTS["bitsandbytes"].config({LAYER: weight, "lm_head": Weight("bf16", torch.ones(2, 2))})
    assert config["load_in_8bit"] is True and config["llm_int8_skip_modules"] == ["lm_head"]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_nf4(group: int) -> None:
    torch.manual_seed(group)
    weight = quantize_torch(NF4, torch.randn(48, 256), group).weight
    single = replace(BitsAndBytesLayout(), double=False)
    got = read(single, {LAYER: weight})[LAYER]
    assert torch.allclose(got, weight.dequantize(), rtol=2e-7, atol=0)
    absmax = single.tensors(LAYER, weight)[f"{LAYER}.weight.absmax"]
    again = replace(weight, scales=(absmax / NF4.unit).view(48, -1))
    check(single, again)  # a file that was read is written with the same numbers


def test_double_quantization_takes_the_nearest_numbers() -> None:
    torch.manual_seed(1)
    weight = quantize_torch(NF4, torch.randn(48, 256), 64).weight
    parts = LAYOUTS["bitsandbytes"].tensors(LAYER, weight)
    absmax = BitsAndBytesLayout(double=False).tensors(LAYER, weight)[f"{LAYER}.weight.absmax"]
    offset = absmax.mean()
    for start in range(0, absmax.numel(), 256):
        block = absmax[start : start + 256] - offset
        outer = block.abs().max()
        distances = (block[:, None] / outer - dynamic_map()).abs()
        codes = parts[f"{LAYER}.weight.absmax"][start : start + 256].long()
        assert torch.equal(distances.gather(1, codes[:, None])[:, 0], distances.min(1).values)
        assert parts[f"{LAYER}.weight.nested_absmax"][start // 256] == outer
    got, want = read(LAYOUTS["bitsandbytes"], {LAYER: weight})[LAYER], weight.dequantize()
    spread = float((absmax - offset).abs().max())
    assert 0 < float((got - want).abs().max()) <= 0.0071 * spread


def test_the_dynamic_map_is_that_of_bitsandbytes() -> None:
    numbers = dynamic_map()
    assert len(set(numbers.tolist())) == 256 and numbers[-1] == 1
    # The ends and the middle of create_dynamic_map(signed=True), from bitsandbytes' files.
    assert torch.allclose(numbers[:3], torch.tensor([-0.9929687, -0.9789063, -0.9648438]))
    assert torch.allclose(numbers[126:129], torch.tensor([-5.5e-07, 0.0, 5.5e-07]))


MIXED: dict[str, Callable[[], dict[str, Weight]]] = {
    "gptq": lambda: {
        LAYER: random_weight(8, 64, 128, 32, zeros=True),
        "model.layers.1.mlp.up_proj": random_weight(4, 64, 128, 64),
        "model.layers.2.mlp.up_proj": random_weight(4, 64, 128, 64, order=True),
        "model.layers.3.mlp.up_proj": random_weight(2, 64, 128, 128),
        "model.layers.4.mlp.up_proj": Weight("bf16", torch.randn(8, 8).bfloat16()),
        "lm_head": Weight("bf16", torch.randn(8, 8).bfloat16()),
    },
    "compressed-tensors": lambda: {
        LAYER: float8(256, 1),
        "model.layers.1.mlp.up_proj": random_weight(4, 64, 128, 64),
        "model.layers.2.mlp.up_proj": random_weight(3, 64, 128, 32),
        "model.layers.3.mlp.up_proj": random_weight(8, 64, 128, 128, zeros=True),
        "model.layers.4.mlp.up_proj": quantize_torch(MXFP4, torch.randn(8, 64), 32).weight,
        "model.layers.5.mlp.up_proj": replace(random_weight(8, 64, 128, 128), activation_bits=8),
        "model.layers.6.mlp.up_proj": random_weight(4, 64, 128, 64),
        "lm_head": Weight("bf16", torch.randn(8, 8).bfloat16()),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_matrices_of_several_formats(name: str) -> None:
    matrices = MIXED[name]()
    for base, got in read(LAYOUTS[name], matrices).items():
        assert torch.equal(got, matrices[base].dequantize()), base
    config = LAYOUTS[name].config(matrices)
    if name == "gptq":
        assert config["bits"] == 4 and config["lm_head"] is False and len(config["dynamic"]) == 3
    else:
        assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
        assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_cache_scales() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    layout = CompressedTensorsLayout(cache=scheme)
    assert layout.config({LAYER: random_weight(4, 8, 64, 32)})["kv_cache_scheme"] == scheme
    parts = layout.cache_tensors("model.layers.0.self_attn", torch.tensor([0.5]), torch.tensor([0.25]))
    assert parts.keys() == {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"}


def minimums() -> Weight:
    weight = random_weight(4, 32, 64, 32)
    return replace(weight, codes=weight.codes + 8, mins=torch.zeros(32, 2).half())


REFUSED: list[tuple[str, Weight, str]] = [
    ("gptq", minimums(), "has minimums"),
    ("gptq", float8(256, 1), "is fp8, needs integers"),
    ("gptq", random_weight(5, 32, 64, 32), "codes of 5 bits"),
    ("gptq", replace(random_weight(4, 32, 64, 32), bits=3), "outside -4..3"),
    ("gptq", random_weight(4, 30, 64, 32), "multiples of 8"),
    ("gptq", replace(random_weight(4, 32, 64, 32), zeros=torch.full((32, 2), -8, dtype=torch.int8)), "use gptq_v2"),
    ("awq", random_weight(8, 32, 64, 32), "codes of 8 bits"),
    ("awq", random_weight(4, 32, 64, 32, order=True), "act-order"),
    ("awq", random_weight(4, 30, 64, 32), "multiple of 8"),
    ("bitsandbytes", random_weight(8, 32, 64, 32), "one scale a row"),
    ("bitsandbytes", random_weight(4, 32, 64, 64), "codes of 4 bits"),
    ("bitsandbytes", quantize_torch(FP4, torch.randn(4, 64), 64).weight, "another code book"),
    ("bitsandbytes", random_weight(8, 32, 64, 32, order=True), "act-order"),
    ("compressed-tensors", minimums(), "has minimums"),
    ("compressed-tensors", random_weight(4, 32, 64, 32, order=True), "static_groups = true, or write layout gptq"),
    ("compressed-tensors", quantize_torch(NF4, torch.randn(4, 64), 64).weight, "another code book"),
]


@pytest.mark.parametrize(("name", "weight", "message"), REFUSED)
def test_weights_that_a_layout_cannot_hold(name: str, weight: Weight, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        LAYOUTS[name].tensors(LAYER, weight)
    assert str(error.value).startswith(f"layout {name}: {LAYER} ") and "\n" not in str(error.value)


def test_configs_that_no_file_can_hold() -> None:
    two = {"a": random_weight(4, 32, 128, 32), "b": random_weight(4, 32, 128, 64)}
    with pytest.raises(ConfigError, match="a file has one size"):
        LAYOUTS["awq"].config(two)
    mixed = {"a": quantize_torch(NF4, torch.randn(4, 64), 64).weight, "b": random_weight(8, 32, 64, 64)}
    with pytest.raises(ConfigError, match="4 and of 8 bits"):
        LAYOUTS["bitsandbytes"].config(mixed)
    for layout in LAYOUTS.values():
        with pytest.raises(ConfigError, match="no matrix is quantized"):
            layout.config({"a": Weight("bf16", torch.ones(2, 2))})


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bias_and_an_unquantized_matrix_stay_as_they_are(name: str) -> None:
    weight = Weight("bf16", torch.randn(4, 8).bfloat16())
    parts = LAYOUTS[name].tensors(LAYER, weight, torch.ones(4))
    assert is_unquantized(weight) and parts.keys() == {f"{LAYER}.weight", f"{LAYER}.bias"}
    assert torch.equal(parts[f"{LAYER}.weight"], weight.codes)
