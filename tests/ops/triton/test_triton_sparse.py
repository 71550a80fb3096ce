"""2:4 matrices of the GPU backend under the interpreter: without their zeros they give what dense ones give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from op_cases.mla import head_matrices
from op_cases.weights import normal
from oracle import write
from quire.core.config import DeviceConfig, flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.backend import Ops, open_backend
from quire.ops.op import REGISTRY
from quire.ops.triton.gpu import interpreting
from quire.ops.weights import Packed, Weight, plain_packed
from triton_ops import TRITON_OPS, close, gpu_ops, needs_triton, reference
from turns import working

pytestmark = needs_triton
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture
def ops() -> Iterator[Ops]:
    """The GPU backend while it leaves out zeros."""
    gpu = gpu_ops().gpu
    assert gpu is not None
    gpu.sparse = True
    yield gpu_ops()
    gpu.sparse = False


def two_of_four(w: Tensor, seed: int = 0) -> Tensor:
    """w [n, k] with zeros in two of each four columns, or more."""
    noise = torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)).view(len(w), -1, 4)
    return w * ((noise.argsort(-1).argsort(-1) < 2) & (noise > 0.1)).view(w.shape)


def pair(ops: Ops, weight: Weight) -> tuple[Packed, Packed]:
    """It as the backend keeps it, and as the definition reads it."""
    packed = ops.pack(weight)
    assert packed.kind == f"sparse24_{weight.kind}" and packed.nbytes < weight.codes.nbytes
    return packed, plain_packed(weight)


@pytest.mark.parametrize(("kind", "n", "k"), [("bf16", 75, 2304), ("f16", 40, 1028), ("bf16", 16, 300)])
def test_rows_are_those_of_the_dense_matrix_alone_and_in_a_batch(ops: Ops, kind: str, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(1)
    weight = Weight(kind, two_of_four(normal(g, n, k)).to(DTYPES[kind]))
    packed, plain = pair(ops, weight)
    x, bias = normal(g, 19, k).to(DTYPES[kind]).to(ops.gpu.device), normal(g, n)
    found = ops.linear(x, packed, bias.to(ops.gpu.device))
    close("linear", found.float().cpu(), reference().linear(x.float().cpu(), plain, bias), 2**-7)
    for rows in (slice(0, 1), slice(7, 12), slice(18, 19)):
        assert torch.equal(ops.linear(x[rows].contiguous(), packed, bias.to(ops.gpu.device)), found[rows])


def test_a_matrix_for_each_head_and_for_each_expert(ops: Ops) -> None:
    g = torch.Generator().manual_seed(2)
    heads = head_matrices(g, "bf16", 3, 64, 256)
    weight = replace(heads, codes=two_of_four(heads.codes))
    packed, plain = pair(ops, weight)
    x = normal(g, 5, 3 * 258)
    found = ops.head_linear(x.to(ops.gpu.device), packed, 3, 64)
    close("head_linear", found.cpu(), reference().head_linear(x, plain, 3, 64), 1e-4)

    weight = Weight("bf16", two_of_four(normal(g, 4 * 32, 256)).bfloat16())
    x, offsets = normal(g, 9, 256), torch.tensor([[0, 2, 2, 8, 9]], dtype=torch.int32)
    made = [each.group(p, 4, 32, None) for each, p in zip((ops, reference()), pair(ops, weight), strict=True)]
    expected = reference().grouped_linear(x, made[1], None, offsets)
    found = ops.grouped_linear(x.to(ops.gpu.device), made[0], None, offsets.to(ops.gpu.device))
    close("grouped_linear", found.cpu(), expected, 1e-4)


def test_other_matrices_stay_dense(ops: Ops) -> None:
    dense = normal(torch.Generator().manual_seed(3), 16, 256)
    assert ops.pack(Weight("bf16", dense.bfloat16())).kind == "bf16"
    assert ops.pack(Weight("f32", two_of_four(dense))).kind == "f32"
    assert ops.pack(Weight("bf16", dense[:, :254].bfloat16() * 0)).kind == "bf16"
    assert ops.pack(Weight("bf16", two_of_four(dense[:, :128]).bfloat16())).kind == "bf16"


def test_torch_multiplies_prompts_where_it_has_sparse_units() -> None:
    if interpreting() or not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no cuSPARSELt"):
            open_backend(DeviceConfig(device="cuda", sparse="on", ops=("linear=cusparselt",)))
        return
    ops = open_backend(DeviceConfig(device="cuda", sparse="on", ops=("linear=cusparselt",)))
    g = torch.Generator().manual_seed(4)
    weight = Weight("bf16", two_of_four(normal(g, 128, 512)).bfloat16())
    packed, x = ops.pack(weight), normal(g, 100, 512).bfloat16()
    expected = reference().linear(x.float(), plain_packed(weight), None)
    assert packed.handle.units is not None
    close("linear", ops.linear(x.to(ops.gpu.device), packed, None).float().cpu(), expected, 2**-7)
    with pytest.raises(ConfigError, match="--sparse on"):
        open_backend(DeviceConfig(device="cuda", ops=("linear=cusparselt",)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_model_says_what_it_says_with_its_zeros(tmp_path: Path) -> None:
    write(tmp_path, "llama", dtype=torch.bfloat16, hidden_size=256, intermediate_size=256)
    made = {
        name: two_of_four(w) if "proj" in name else w for name, w in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    missing = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)
    found, sizes = list[list[int]](), []
    asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for sparse in ("off", "on"):
        small = {"num_blocks": 32, "enforce_eager": True, "device": "cuda", "ops": missing}
        engine = start_engine(flat_config(model=str(tmp_path), sparse=sparse, **small))
        engine.submit(Request(id="0", prompt=(5, 6, 7), params=asked, seed=0, arrival=0.0))
        found.append([t for _ in working(engine) for out in engine.step() for t in out.tokens])
        sizes.append(engine.model.weight_bytes)
    assert found[0] == found[1] and len(found[0]) == 6 and sizes[1] < sizes[0]
