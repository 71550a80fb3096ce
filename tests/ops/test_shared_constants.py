"""Numbers that kernels and Python agree on: csrc/facts.h as Python reads it, with the extension and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.core.parallel import SPLIT
from quire.ops import facts
from quire.ops.cpu.state import TABLE_NUMBERS
from quire.ops.experts import ACTIVATIONS, SCORES
from quire.ops.layout import KV_FORMATS, KVLayout
from quire.ops.native import load_native

module = load_native()
built = pytest.mark.skipif(module is None, reason="quire._native was not built (no C++ compiler)")


@built
def test_every_name_that_python_knows_has_a_number() -> None:
    for what, names in (("activation", ACTIVATIONS), ("score", SCORES)):
        numbers = facts.numbers_of(what)
        assert set(numbers) == set(names) and sorted(numbers.values()) == list(range(len(names)))
    formats = facts.dtype_numbers_of("cache")
    assert set(formats) == set(KV_FORMATS) and sorted(formats.values()) == list(range(len(KV_FORMATS)))
    assert {KVLayout(16, 1, 64, dtype).format for dtype in KV_FORMATS} == set(formats.values())
    assert sorted(TABLE_NUMBERS.values()) == list(range(len(TABLE_NUMBERS)))


@built
def test_what_python_says_without_the_extension_is_what_kernels_have() -> None:
    assert module is not None
    said = module.facts()
    assert said["SPLIT"] == SPLIT
    assert all(isinstance(name, str) and isinstance(number, int) for name, number in said.items())


def test_without_the_extension_python_knows_what_other_backends_need() -> None:
    code = f"""
import sys
sys.modules["quire._native"] = None
import quire.ops.layout, quire.ops.experts, quire.plan.weights
from quire.ops import facts
assert facts.LANES == {facts.LANES} and facts.numbers_of("activation") == {{}}
assert len(quire.ops.experts.padded_rows(5)) == {facts.LANES}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
