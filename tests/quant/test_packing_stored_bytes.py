"""Matrices packed right out of their file's bytes: the bits of those taken apart first, whatever is done to rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gguf_models import random_blocks
from op_runs import UNITS_HERE, generator, native, ops_of
from quire.core.dtypes import F32
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import to_numpy
from quire.ops.backend import Ops
from quire.ops.weights import Packed
from quire.quant.base import QWeight
from quire.quant.gguf import TYPES, Block
from quire.quant.gguf_decode import FORMS
from quire.quant.rtn import INT4, INT8, RoundToNearest
from quire.quant.stored import StoredWeight

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
AS_STORED = tuple(name for name, form in FORMS.items() if form.native)
OF_32 = tuple(name for name in AS_STORED if TYPES[name].numbers == 32)
ODD = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0xB555)
"""float16 units: both zeros, the smallest, a negative subnormal one, the largest of both signs, others."""


def halves(name: str) -> tuple[int, ...]:
    """Bytes of a block at which its float16 lie."""
    form = FORMS[name]
    if form.super is not None:
        return tuple(at for at in (form.super.unit, form.super.min_unit) if at >= 0)
    return () if form.wide else (0, 2)[: 1 + form.mins]


def stored(name: str, n: int, k: int, seed: int = 0) -> StoredWeight:
    """Random bytes, float16 included, which are of `ODD` or random and finite."""
    g, kind = generator(seed), TYPES[name]
    raw = torch.randint(0, 256, (n, k // kind.numbers, kind.nbytes), generator=g, dtype=torch.uint8)
    for at in halves(name):
        raw[..., at + 1] &= 0xBF  # an exponent that is not all ones
        odd = torch.tensor(ODD, dtype=torch.uint16).view(torch.uint8).view(-1, 2)
        raw[::3, 0, at : at + 2] = odd[torch.randint(0, len(ODD), (len(raw[::3]),), generator=g)]
    weight = Block(TYPES[name]).load({name: raw.flatten(1).numpy()}, F32)
    assert isinstance(weight, StoredWeight)
    return weight


def taken_apart(weight: QWeight) -> QWeight:
    return QWeight(weight.weight)


def check_equal(a: Packed, b: Packed) -> None:
    assert (a.kind, a.n, a.k, a.group, a.nbytes) == (b.kind, b.n, b.k, b.group, b.nbytes)
    for x, y in zip((*a.buffers, *a.shared), (*b.buffers, *b.shared), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("n", [1, 16, 75, 160])
@pytest.mark.parametrize("name", AS_STORED)
def test_bytes_give_the_bits_of_codes(name: str, n: int) -> None:
    ops, weight = ops_of("auto"), stored(name, n, 768)
    packed = weight.pack(ops)
    assert "weight" not in vars(weight), "nothing was taken apart"
    check_equal(packed, taken_apart(weight).pack(ops))


def odd_numbers(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, and groups of zeros of either sign, of two extremes, of tiny numbers, of equal ones."""
    w = torch.randn(n, k, generator=generator())
    w[3, :64], w[4, :64] = 0.0, -0.0
    w[5] = w[5].clamp(-1.0, 1.0)
    w[6], w[7], w[8], w[9] = w[6] * 1e-7, w[7] * 1e-9, 1.0, -w[9].abs()
    w[10] = w[10].sign()
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scheme", [INT4, INT8], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", UNITS_HERE)
def test_numbers_are_rounded_as_they_are_packed(
    isa: str, scheme: RoundToNearest, group: int, dtype: torch.dtype
) -> None:
    ops, w = ops_of(isa), odd_numbers(75, 384, dtype)
    weight, eager = scheme.at_pack(to_numpy(w), group), scheme.quantize(to_numpy(w), group)
    check_equal(weight.pack(ops), eager.pack(ops))
    assert "weight" not in vars(weight) and weight.label == eager.label
    order = torch.arange(74, -1, -2)
    check_equal(weight.take_rows(order).pack(ops), eager.take_rows(order).pack(ops))
    check_equal(weight.slice_cols(128, 384).pack(ops), eager.slice_cols(128, 384).pack(ops))
    check_equal(QWeight.cat_rows([weight, weight]).pack(ops), QWeight.cat_rows([eager, eager]).pack(ops))
    check_equal(weight.with_activations(16).pack(ops), eager.with_activations(16).pack(ops))
    for bad in (float("nan"), float("inf"), 3e9):
        broken = w.float()
        broken[70, 200] = bad
        with pytest.raises(ModelError, match="nan, inf"):
            scheme.at_pack(broken.numpy(), group).pack(ops)


LAYOUTS: dict[str, Callable[[QWeight, QWeight], QWeight]] = {
    "rows": lambda a, b: a.take_rows(slice(5, 60)),
    "order": lambda a, b: a.take_rows(torch.arange(74, -1, -2)),
    "columns": lambda a, b: a.slice_cols(256, 768),
    "order of an order": lambda a, b: a.take_rows(torch.arange(74, -1, -2)).take_rows(torch.tensor([3, 3, 0, 36])),
    "rows of an order": lambda a, b: a.take_rows(torch.arange(74, -1, -1)).take_rows(slice(7, 50)),
    "below": lambda a, b: QWeight.cat_rows([a.take_rows(slice(0, 48)), b]),
    "below a part of a block": lambda a, b: QWeight.cat_rows([a, b]),
    "all": lambda a, b: QWeight.cat_rows([b.slice_cols(256, 768), a.slice_cols(0, 512)]).take_rows(slice(3, 100)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "IQ4_XS", "Q4_0", "Q5_1", "Q8_0", "MXFP4"])
def test_rows_and_columns_are_cut_as_bytes(name: str, layout: str) -> None:
    ops, a, b = ops_of("auto"), stored(name, 75, 1024), stored(name, 33, 1024, 1)
    change = LAYOUTS[layout]
    made = change(a, b)
    assert isinstance(made, StoredWeight)
    check_equal(made.pack(ops), change(taken_apart(a), taken_apart(b)).pack(ops))


@pytest.mark.parametrize("name", OF_32)
def test_blocks_of_32_are_cut_at_the_borders_of_groups(name: str) -> None:
    weight = stored(name, 40, 288)
    cut = weight.slice_cols(32, 160)
    assert isinstance(cut, StoredWeight)
    check_equal(cut.pack(ops_of("auto")), taken_apart(weight).slice_cols(32, 160).pack(ops_of("auto")))
    with pytest.raises(ConfigError, match="group borders"):
        weight.slice_cols(16, 160)


def test_an_order_of_rows_that_are_not_there_is_refused() -> None:
    weight = stored("Q4_K", 32, 256)
    for order in ([0, 32], [-1, 0]):
        with pytest.raises(ValueError, match="not among 32"):
            weight.take_rows(torch.tensor(order)).pack(ops_of("auto"))


def test_what_bytes_cannot_express_is_done_to_codes() -> None:
    ops, a, b = ops_of("auto"), stored("Q4_K", 32, 512), stored("Q5_K", 32, 512)
    assert a.slice_cols(128, 512).pack(ops).kind == "int4"
    assert a.with_activations(8) is a and a.with_activations(16).pack(ops).kind == "int4"
    assert a.label == taken_apart(a).label and b.label == taken_apart(b).label and a.shape == (32, 512)
    assert np.array_equal(a.dequantize(), a.weight.dequantize())
    q5, q8 = stored("Q5_0", 16, 512), stored("Q8_0", 16, 512)
    eager = QWeight.cat_rows([taken_apart(q5), taken_apart(q8)])
    check_equal(QWeight.cat_rows([q5, q8]).pack(ops), eager.pack(ops))
    q6 = stored("Q6_K", 16, 512)
    with pytest.raises(Exception, match="cannot fuse"):
        QWeight.cat_rows([a, q6])


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize("name", [name for name in AS_STORED if halves(name)])
def test_scales_that_are_no_numbers_are_refused(name: str, half: int) -> None:
    for at in halves(name):
        raw = torch.from_numpy(random_blocks((40, 512), gguf.GGMLQuantizationType[name], 0))
        blocks = raw.view(40, 512 // TYPES[name].numbers, -1)
        blocks[37, 1, at : at + 2] = torch.tensor([half], dtype=torch.uint16).view(torch.uint8)
        weight = Block(TYPES[name]).load({name: raw.numpy()}, F32)
        for ask in (lambda w=weight: w.pack(ops_of("auto")), lambda w=weight: w.weight):
            with pytest.raises(ModelError, match="nan or inf"):
                ask()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "MXFP4"])
def test_experts_are_packed_one_by_one_as_bytes(name: str) -> None:
    ops: Ops = ops_of("auto")
    parts = [stored(name, 48, 512, seed) for seed in range(3)]
    packed = ops.pack_stack((p.source(ops) for p in parts), 3)
    assert not any("weight" in vars(p) for p in parts)
    check_equal(packed, QWeight.cat_rows([taken_apart(p) for p in parts]).pack(ops))
