"""Wrong arguments of ops: an error that says so, never the end of the process.

One argument of a valid call is damaged at a time. `make sanitize` runs the same under address and integer checks, where
a read outside a tensor ends the process too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_cases import CASES
from op_runs import UNITS_HERE, copied, ops_of, tensors
from quire.core.errors import QuireError
from quire.ops.backend import Ops
from quire.ops.experts import Grouped
from quire.ops.layout import KVLayout
from quire.ops.native import load_native
from quire.ops.op import Case
from quire.ops.weights import Packed, Weight

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native was not built (no C++ compiler)")
NAMES = sorted(CASES)
REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError, QuireError)
MOST_NUMBERS = 100_000
HUGE = 2**40

TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda t: t.double(),
    "half": lambda t: t.half(),
    "int16": lambda t: t.to(torch.int16),
    "bytes": lambda t: t.contiguous().view(torch.uint8),
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[-1:]]),
    "a column less": lambda t: t[..., :-1].contiguous(),
    "a column more": lambda t: torch.cat([t, t[..., -1:]], -1),
    "columns not contiguous": lambda t: torch.cat([t, t], -1)[..., ::2],
    "transposed": lambda t: t.t() if t.dim() == 2 else t.flip(0),
    "flat": lambda t: t.reshape(-1),
    "a dimension more": lambda t: t[None],
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "one number": lambda t: t.reshape(-1)[:1],
    "huge and empty": lambda t: t.new_empty(0, HUGE),
    "huge by strides": lambda t: t.reshape(-1)[:1].expand(HUGE),
    "all minus one": lambda t: torch.full_like(t, -1) if t.dtype.is_signed else t,
    "all largest": lambda t: torch.full_like(t, 2**31 - 1 if t.dtype in (torch.int32, torch.int64) else 100),
    "NaN": lambda t: torch.full_like(t, float("nan")) if t.dtype.is_floating_point else t,
    "infinite": lambda t: torch.full_like(t, float("inf")) if t.dtype.is_floating_point else t,
}
INT_CHANGES = (-1, 0, 1, 3, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63))
FLOAT_CHANGES = (0.0, -1.0, float("nan"), float("inf"), 1e308)


@functools.cache
def small_cases(name: str) -> list[Case]:
    """Valid calls of an op, those that copy fast."""
    found = list(CASES[name](torch.Generator().manual_seed(0)))
    return [c for c in found if sum(t.numel() for t in tensors(list(c.values()))) < MOST_NUMBERS] or found[:1]


def damaged(draw: Callable[[Any], Any], value: Any) -> Any:
    """`value` with one thing in it changed."""
    if isinstance(value, Tensor):
        if value.numel() == 0 or value.dim() == 0:
            return value
        return TENSOR_CHANGES[draw(st.sampled_from(sorted(TENSOR_CHANGES)))](value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from(INT_CHANGES))
    if isinstance(value, float):
        return draw(st.sampled_from(FLOAT_CHANGES))
    if isinstance(value, str):
        return "unknown"
    if isinstance(value, (list, tuple)) and value:
        at = draw(st.integers(0, len(value) - 1))
        return type(value)([*value[:at], damaged(draw, value[at]), *value[at + 1 :]])
    if isinstance(value, KVLayout):
        return dataclasses.replace(value, block_size=draw(st.sampled_from((1, 2, 16, 32, 128))))
    if isinstance(value, (Packed, Grouped)):
        return None  # what `pack` and `group` made: addresses, which no caller writes
    if dataclasses.is_dataclass(value):
        return damaged_field(draw, value)
    return draw(st.sampled_from((None, 7, torch.zeros(3)))) if value is None else None


def damaged_field(draw: Callable[[Any], Any], value: Any) -> Any:
    """A dataclass with one field damaged."""
    fields = [f.name for f in dataclasses.fields(value) if f.init]
    name = draw(st.sampled_from(fields))
    return dataclasses.replace(value, **{name: damaged(draw, getattr(value, name))})


def packed(ops: Ops, value: Any) -> Any:
    """An argument as the backend takes it."""
    if isinstance(value, Weight):
        return ops.pack(value)
    if isinstance(value, Grouped) and value.packed.plain is not None:
        return ops.group(ops.pack(value.packed.plain), value.experts, value.n, value.bias)
    if isinstance(value, Tensor) and not value.is_contiguous():
        return value  # a copy would be contiguous
    return copied(value)


def run_damaged(isa: str, name: str, case: Case) -> Exception | None:
    """The refusal of a call, None when it was accepted. Other errors than refusals pass through."""
    ops = ops_of(isa)
    try:
        ops.begin_step()
        getattr(ops, name)(**{argument: packed(ops, value) for argument, value in case.items()})
    except REFUSALS as error:
        return error
    return None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_argument_ends_no_process(name: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(small_cases(name)))
    argument = data.draw(st.sampled_from(sorted(case)))
    isa = data.draw(st.sampled_from(UNITS_HERE))
    run_damaged(isa, name, case | {argument: damaged(data.draw, case[argument])})


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_another_type_or_form_are_refused(name: str) -> None:
    """Every tensor that an op is given by itself, in the first of its cases that has numbers in it."""
    for argument in sorted({a for case in small_cases(name) for a in case}):
        whole = (c for c in small_cases(name) if isinstance(c.get(argument), Tensor) and c[argument].numel() > 2)
        case = next(whole, None)
        if case is None:
            continue
        for change in ("float64", "columns not contiguous", "a dimension more"):
            bad = case | {argument: TENSOR_CHANGES[change](case[argument])}
            assert run_damaged("auto", name, bad) is not None, f"{name}: {argument} as {change}"
