"""Every native op, on every instruction set this machine has, against its torch definition and against itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_cases import CASES, of_module
from op_cases import reference as cases
from op_runs import UNITS_HERE, close, generator, native, one_sequence, ops_of, reference, run
from op_runs import pytestmark as pytestmark
from over_torch import arrays, select
from over_torch import tensors as tensors_of
from paths import CSRC
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F32, Dtype
from quire.core.errors import ConfigError
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.cpu.pack import pack
from quire.ops.layout import KVLayout
from quire.ops.native import UNITS
from quire.ops.op import REGISTRY, Case
from quire.ops.reference.caches import allocate, write
from quire.ops.weights import Weight, plain_packed

OPS = of_module("reference")
MODULES = ("reference", "rowwise", "lora", "ngrams", "streams", "whole")
COMPARED = [name for module in MODULES for name in of_module(module)]
"""Ops that no other file of tests compares with their definition."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The references are small: torch's threads would only spin against the native pool's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", COMPARED)
def test_equals_the_reference(name: str, isa: str) -> None:
    definition = REGISTRY[name]
    for case in CASES[name](generator()):
        expected = run(reference(), name, case)
        found = run(ops_of(isa), name, case)
        assert len(found) == len(expected)
        # bf16 caches may round to the neighbour
        cached = name == "rope_and_cache" and case["cache"].layout.dtype == BF16
        for f, e in zip(found, expected, strict=True):
            close(f"{name}/{isa}", f, e, 2**-8 if cached and f.dim() > 2 else definition.tolerance)


def test_units_are_known() -> None:
    assert UNITS_HERE and set(UNITS_HERE) <= set(UNITS)


def test_units_of_the_build_are_those_of_the_options() -> None:
    table = (CSRC / "units.cmake").read_text()
    assert set(re.findall(r"^ *quire_unit\((\w+)", table, re.MULTILINE)) == set(UNITS)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_a_row_of_linear_does_not_depend_on_the_batch(kind: str, isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    k = 512 if kind.startswith("int") else 2304  # float weights walk a long k in parts
    w = ops.pack(cases.random_weight(g, kind, 75, k, 64))
    x, bias = cases.normal(g, 200, k), cases.normal(g, 75)
    ops.begin_step()
    whole = ops.linear(x, w, bias).clone()
    for m in (1, 2, 3, 5, 8, 9, 16, 17, 64, 199):
        for first in (0, 1, 200 - m):
            ops.begin_step()
            part = ops.linear(x[first : first + m].contiguous(), w, bias)
            assert torch.equal(part, whole[first : first + m]), (m, first)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_attention_over_f32_caches_is_as_exact_as_f32(isa: str) -> None:
    for case in cases.attention_extra_cases(generator(), F32):
        expected, found = (run(ops, "attention", case)[0] for ops in (reference(), ops_of(isa)))
        close(f"attention/{isa}", found, expected, 2e-6)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize(("window", "extras"), [(0, ""), (150, ""), (0, "sinks alibi bias"), (150, "softcap sinks")])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_a_row_of_attention_does_not_depend_on_the_batch(
    block_size: int, dtype: Dtype, window: int, extras: str, isa: str
) -> None:
    ops = ops_of(isa)
    rows = ((130, 700), (1, 1300), (1, 1), (37, 37), (2, 600))
    layout = KVLayout(block_size, 2, 40 if block_size == 8 else 64, dtype)
    case = cases.attention_case(generator(1), layout, 6, rows, window, extras=extras)
    ops.begin_step()
    whole = ops.attention(**case).clone()
    for s, (count, _) in enumerate(rows):
        begin = int(case["cu_q"][s])
        for size in (1, 3, 64, count) if s == 0 else (1, count):
            for first in range(0, count, size)[:: max(1, count // size // 4)]:
                last = min(count, first + size)
                ops.begin_step()
                part = ops.attention(**one_sequence(case, s, first, last))
                assert torch.equal(part, whole[begin + first : begin + last]), (s, first, last)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    g = generator(2)
    attention = cases.attention_case(g, KVLayout(16, 2, 64, BF16), 4, ((1, 2000), (100, 300), (1, 40)))
    linear = {"x": cases.normal(g, 33, 256), "w": cases.random_weight(g, "int4", 100, 256), "bias": None}
    expected = [run(ops_of("auto"), "attention", attention)[0], run(ops_of("auto"), "linear", linear)[0]]
    assert native is not None
    native.set_threads(threads)
    try:
        for _ in range(5):
            found = [run(ops_of("auto"), "attention", attention)[0], run(ops_of("auto"), "linear", linear)[0]]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        native.set_threads(2)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_attention_does_not_depend_on_the_block_size(dtype: Dtype) -> None:
    found = []
    for block_size in (1, 2, 16, 64):
        g = generator(5)
        case = cases.attention_case(g, KVLayout(block_size, 2, 32, dtype), 4, ((5, 700), (1, 90)))
        k, v, q = (cases.normal(generator(6), 1, 2000, 2, 32)[0] for _ in range(3))
        for s, context in enumerate(case["context"].tolist()):
            at = torch.arange(context)
            slots = case["block_tables"][s, at // block_size].long() * block_size + at % block_size
            write(case["cache"], slots, k[:context], v[:context])
        case["qkv"] = q[:6].repeat(1, 1, 4).flatten(1).contiguous()
        found.append(run(ops_of("auto"), "attention", case)[0])
    assert all(torch.equal(f, found[0]) for f in found)


def small_step(ops: Ops, x: Tensor, case: Case, w: Any) -> Tensor:
    y = ops.linear(ops.rmsnorm(x, torch.ones(x.shape[1]), 1e-6), w, None)
    z = ops.attention(**(case | {"qkv": y}))
    out: Tensor = ops.gated_activation(z, "silu")
    return out


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_replay_equals_the_eager_step_on_new_inputs(device: str) -> None:
    g = generator(4)
    layout = KVLayout(16, 2, 32, BF16)
    case = cases.attention_case(g, layout, 4, ((1, 100), (1, 30)), garbage=False)
    ops = ops_of("auto") if device == "cpu" else reference()
    w = ops.pack(cases.random_weight(g, "int4", 8 * 32, 64))
    x = cases.normal(g, 2, 64)
    replay = ops.record(lambda: small_step(ops, x, case, w))
    for context in ((100, 30), (7, 21), (90, 1)):
        x.copy_(cases.normal(g, 2, 64))
        case["context"].copy_(torch.tensor(context, dtype=torch.int32))
        ops.begin_step()
        expected = small_step(ops, x, case, w).clone()
        ops.begin_step()
        found = replay.run()
        later = ops.rmsnorm(x, torch.ones(64), 1e-6)  # must not land on the replay's output
        assert found.data_ptr() != later.data_ptr() or device == "reference"
        assert torch.equal(found, expected)


def test_a_replay_survives_the_growth_of_the_arena() -> None:
    ops = select(DeviceConfig(device="cpu"))
    x = cases.normal(generator(), 3, 64)
    replay = ops.record(lambda: ops.activation(x, "relu"))
    ops.begin_step()
    big = ops.activation(torch.ones(3000, 1024), "relu")
    assert torch.equal(big, torch.ones(3000, 1024))
    assert torch.equal(replay.run(), x.relu())


def unpack(data: Tensor, kind: str, n: int, k: int) -> Tensor:
    """The matrix from its packed bytes, written the way csrc/pack.cpp describes the layout."""
    if kind == "int4":
        words = data.view(-1, k // 8, 16, 4)
        codes = torch.cat(((words & 15), (words >> 4)), -1).to(torch.int8) - 8
        return codes.permute(0, 2, 1, 3).reshape(-1, k)[:n]
    if kind == "int8":
        return (data.view(-1, k // 4, 16, 4).short() - 128).to(torch.int8).permute(0, 2, 1, 3).reshape(-1, k)[:n]
    dtype, pair = (torch.bfloat16, 2) if kind == "bf16" else (torch.float32, 1)
    padded = -(-k // pair) * pair
    return data.view(dtype).view(-1, padded // pair, 16, pair).permute(0, 2, 1, 3).reshape(-1, padded)[:n, :k]


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("n", [1, 16, 75])
def test_packing_keeps_every_value(kind: str, n: int) -> None:
    k = 192 if kind.startswith("int") else 193
    weight = cases.random_weight(generator(), kind, n, k, 64, zeros=True)
    packed = tensors_of(ops_of("auto").pack(weight))
    assert torch.equal(unpack(packed.buffers[0], kind, n, k), weight.codes)
    assert packed.nbytes == sum(b.numel() for b in packed.buffers)
    if weight.scales is not None and weight.zeros is not None:
        scales = packed.buffers[1].view(torch.float16).view(-1, k // 64, 16)
        zeros = packed.buffers[2].view(torch.int8).view(-1, k // 64, 16)
        assert torch.equal(scales.transpose(1, 2).flatten(0, 1)[:n], weight.scales)
        assert torch.equal(zeros.transpose(1, 2).flatten(0, 1)[:n], weight.zeros)


def test_scales_may_be_float32() -> None:
    weight = cases.random_weight(generator(), "int4", 20, 64)
    assert weight.scales is not None
    wide = Weight("int4", weight.codes, weight.scales.float(), None, 32)
    x = cases.normal(generator(), 3, 64)
    a, b = (run(ops_of("auto"), "linear", {"x": x, "w": w, "bias": None})[0] for w in (weight, wide))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 48}, "group of 48"),
        ({"codes": torch.zeros(4, 80, dtype=torch.int8)}, "80 columns are not a multiple"),
        ({"codes": torch.zeros(4, 64)}, "float32"),
        ({"codes": torch.full((4, 64), 9, dtype=torch.int8)}, "outside -8..7"),
        ({"scales": torch.zeros(4, 3)}, "scales must have the shape"),
        ({"kind": "int3"}, "known kinds"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "kind": "int4",
        "codes": torch.zeros(4, 64, dtype=torch.int8),
        "scales": torch.ones(4, 2).half(),
        "group": 32,
    }
    with pytest.raises(ConfigError, match=message):
        cpu = ops_of("auto").cpu
        assert cpu is not None
        pack(cpu, arrays(Weight(**(fields | change))))


def test_nan_activations_stay_visible() -> None:
    ops, x = ops_of("auto"), torch.ones(2, 64)
    x[1, 5] = torch.nan
    for kind in ("f32", "bf16", "int8", "int4"):
        w = cases.random_weight(generator(), kind, 16, 64)
        out = run(ops, "linear", {"x": x, "w": w, "bias": None})[0]
        assert not out[0].isnan().any() and out[1].isnan().all(), kind
        assert run(reference(), "linear", {"x": x, "w": w, "bias": None})[0][1].isnan().all(), kind
    assert ops.activation(x, "silu")[1, 5].isnan() and ops.rmsnorm(x, torch.ones(64), 1e-6)[1].isnan().all()


def attention_arguments() -> Case:
    return cases.attention_case(generator(), KVLayout(16, 1, 32, BF16), 2, ((2, 40), (1, 5)))


@pytest.mark.parametrize(
    "change",
    [
        {"cu_q": torch.tensor([0, 2, 4], dtype=torch.int32)},
        {"cu_q": torch.tensor([0, -1, 3], dtype=torch.int32)},
        {"context": torch.tensor([1, 5], dtype=torch.int32)},
        {"context": torch.tensor([40, 500], dtype=torch.int32)},
        {"context": torch.tensor([40, 5], dtype=torch.int64)},
        {"block_tables": torch.full((2, 4), 99, dtype=torch.int32)},
        {"spec": AttentionSpec(1.0, window=1 << 63)},
        {"spec": AttentionSpec(0.0)},
        {"spec": AttentionSpec(1.0, softcap=-1.0)},
        {"spec": AttentionSpec(1.0, sinks=torch.zeros(3))},
        {"spec": AttentionSpec(1.0, alibi=torch.zeros(2, dtype=torch.float64))},
        {"qkv": torch.zeros(3, 100)},
    ],
)
def test_attention_refuses_bad_arguments(change: Case) -> None:
    with pytest.raises(ValueError, match=r"attention|qkv|block table"):
        ops_of("auto").attention(**(attention_arguments() | change))


def test_ops_refuse_indices_outside_their_tables() -> None:
    ops, table = ops_of("auto"), torch.zeros(5, 8)
    for bad in (-1, 5):
        index = torch.tensor([bad], dtype=torch.int32)
        with pytest.raises(ValueError, match="outside the table"):
            ops.embedding(index, table)
        with pytest.raises(ValueError, match="outside the batch"):
            ops.take_rows(table, table, index)
        with pytest.raises(ValueError, match="outside the batch"):
            ops.pick_rows(table, index)
    layout = KVLayout(16, 1, 8, F32)
    cache = allocate(layout, 2)
    with pytest.raises(ValueError, match="outside the cache"):
        ops.copy_blocks([cache], ((0, 2),))
    with pytest.raises(ValueError, match="outside the cache"):
        ops.zero_blocks([cache], (2,))
    qkv, rope = torch.zeros(1, 24), cases.rope_table(4, 4)
    for position, slot, message in ((4, 0, "position"), (-1, 0, "position"), (0, 32, "slot"), (0, -2, "slot")):
        with pytest.raises(ValueError, match=message):
            at = torch.tensor([position], dtype=torch.int32)
            ops.rope_and_cache(qkv, at, rope, torch.tensor([slot]), cache, None, 1e-6)


def test_native_calls_check_their_arguments() -> None:
    assert native is not None
    ids = native.ops(UNITS_HERE[0])
    for args in ((), (1, 2, 3), (0, 0, 0, 1, 1, 1e-5), ("x",) * 6):
        with pytest.raises(ValueError, match="rmsnorm"):
            native.call(ids["rmsnorm"], args)
    with pytest.raises(ValueError, match="unknown op id"):
        native.call(10**6, ())
    with pytest.raises(ValueError, match="threads"):
        native.set_threads(-1)


def test_selection_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="isa"):
        select(DeviceConfig(device="cpu", isa="sse9"))
    with pytest.raises(ConfigError, match="known ops"):
        select(DeviceConfig(device="cpu", ops=("atention=reference",)))
    with pytest.raises(ConfigError, match="not one of"):
        select(DeviceConfig(device="tpu"))


def test_an_overridden_linear_still_works() -> None:
    ops = select(DeviceConfig(device="cpu", ops=("linear=reference",)))
    weight, x = cases.random_weight(generator(), "int8", 8, 64), cases.normal(generator(), 2, 64)
    expected = reference().linear(x, plain_packed(weight), None)
    assert torch.equal(ops.linear(x, ops.pack(weight), None), expected)
