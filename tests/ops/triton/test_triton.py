"""Every kernel of the GPU backend against its definition: under the interpreter, or on a GPU (TRITON_INTERPRET=0)."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
import torch

from op_cases import CASES
from quire.core.dtypes import F32
from quire.core.errors import ConfigError
from quire.ops.choice import HOST, OPS, devices
from quire.ops.op import IMPLEMENTATIONS, REGISTRY, load_modules
from quire.ops.triton.gpu import choose_row, load_kernels
from triton_ops import TRITON_OPS, close, needs_triton, run_gpu, run_reference

OFTEN = {"attention": 12, "choose_blocks": 5, "choose_pooled": 4, "choose_tokens": 3, "delta_rule": 5, "expert_mlp": 4,
         "latent_attention": 2, "linear": 3, "route": 3, "sample": 3, "ssm_scan": 3}  # fmt: skip
"""Of ops with many cases every run takes one of so many."""
quiet = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of inf and nan when interpreted


@pytest.mark.sampled(5)
@needs_triton
@quiet
@pytest.mark.parametrize("name", TRITON_OPS)
def test_equals_the_reference(name: str) -> None:
    """Of those with many cases, one of every few: the slow test has all."""
    equals_the_reference(name, OFTEN.get(name, 1))


@needs_triton
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("name", OFTEN)
def test_equals_the_reference_in_all_cases(name: str) -> None:
    equals_the_reference(name, 1)


def equals_the_reference(name: str, every: int) -> None:
    definition = REGISTRY[name]
    for case in islice(CASES[name](torch.Generator().manual_seed(0)), 0, None, every):
        found, expected = run_gpu(name, case), run_reference(name, case)
        assert len(found) == len(expected)
        # 16-bit caches may round to the neighbour
        cached = "cache" in name and case["cache"].layout.dtype != F32
        for f, e in zip(found, expected, strict=True):
            close(name, f, e, 2**-8 if cached and f.dim() > 2 else definition.tolerance)


def test_nothing_imports_triton_before_it_is_chosen() -> None:
    program = (
        "import sys; from quire.ops.backend import open_backend; from quire.core.config import DeviceConfig;"
        "import quire.engine.llm, quire.cli.app; open_backend(DeviceConfig(device='reference'));"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_triton)])
def test_the_table_of_ops_is_the_registry(backend: str) -> None:
    if backend == "triton":
        load_kernels()
    else:
        load_modules("quire.ops.cpu")
    assert set(OPS) == set(REGISTRY)
    assert all(backend in IMPLEMENTATIONS[op] for op in OPS if backend == "cpu" or op not in HOST)
    named = {
        op: tuple(w.partition(":")[2] for w in fns if w.startswith(f"{backend}:"))
        for op, fns in IMPLEMENTATIONS.items()
    }
    assert {op: others for op, others in named.items() if others} == devices()[backend].others


def test_the_first_row_that_fits_gives_the_sizes() -> None:
    rows = [{"when": {"n": [1, 64]}, "use": {"BLOCK": 16}}, {"use": {"BLOCK": 64}}]
    rows.append({"device": "NVIDIA H200", "when": {"n": [4096, 4096]}, "use": {"BLOCK": 128}})
    assert choose_row(rows, "other", "linear", {"n": 64})["BLOCK"] == 16
    assert choose_row(rows, "other", "linear", {"n": 4096})["BLOCK"] == 64
    assert choose_row(rows, "NVIDIA H200", "linear", {"n": 4096})["BLOCK"] == 128
    with pytest.raises(ConfigError, match=r"linear\.json has no row for \{'n': 65\}"):
        choose_row(rows[:1], "other", "linear", {"n": 65})
