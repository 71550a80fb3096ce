"""Formats under a budget: the least damage that brute force finds, and never over it."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compress.quantize.bit_allocation import choose_formats
from quire.core.errors import ConfigError

Options = dict[str, dict[str, tuple[int, float]]]
FORMATS = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.integers(0, 30), st.one_of(st.integers(0, 9).map(float), st.floats(-1e3, 1e3))),
    min_size=1,
)


def total(options: Options, chosen: dict[str, str], part: int) -> float:
    return sum(options[name][format][part] for name, format in chosen.items())


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from("uvwxyz"), FORMATS, min_size=1, max_size=6), st.integers(0, 120))
def test_no_choice_that_fits_does_less_damage(options: Options, budget: int) -> None:
    every = [dict(zip(options, formats, strict=True)) for formats in product(*options.values())]
    fitting = [chosen for chosen in every if total(options, chosen, 0) <= budget]
    if not fitting:
        with pytest.raises(ConfigError, match=f"a size of {budget} bytes cannot be met: the smallest formats take"):
            choose_formats(options, budget)
        return
    chosen = choose_formats(options, budget)
    assert list(chosen) == list(options) and total(options, chosen, 0) <= budget
    assert total(options, chosen, 1) == pytest.approx(min(total(options, c, 1) for c in fitting), abs=1e-6)


def test_a_model_of_two_hundred_matrices_beats_one_format_for_all() -> None:
    draw = random.Random(0)
    options: Options = {}
    for layer in range(32):
        for at, count in enumerate((4096 * 4096, 4096 * 1024, 4096 * 1024, 4096 * 4096, *[4096 * 11008] * 3)):
            factor = draw.lognormvariate(0, 1) * count
            damage = {bits: factor * 4.0**-bits * draw.uniform(0.8, 1.2) for bits in (2, 3, 4, 8)}
            options[f"{layer}.{at}"] = {f"int{b}": (count * (4 * b + 1) // 32, d) for b, d in damage.items()}
    budget = sum(formats["int4"][0] for formats in options.values())
    chosen = choose_formats(options, budget)
    assert 0.999 * budget < total(options, chosen, 0) <= budget
    assert total(options, chosen, 1) < 0.92 * sum(formats["int4"][1] for formats in options.values())


def test_nothing_to_choose_for_and_nothing_to_choose_by() -> None:
    assert choose_formats({}, 0) == {}
    with pytest.raises(ConfigError, match="a has no format or a damage that is nan"):
        choose_formats({"a": {"int4": (1, float("nan"))}}, 9)
    with pytest.raises(ConfigError, match="a has no format"):
        choose_formats({"a": {}}, 9)
