"""Weight formats: error bounds, layout operations, and what quantizing a whole model does to its logits."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from oracle import BACKENDS, backend, logits, relative_error, write
from over_torch import over_torch
from paged_model import Paged, prompt
from quire.core.config import flat_config
from quire.core.dtypes import F16
from quire.core.errors import ConfigError, ModelError
from quire.model.build import Model, load_model
from quire.model.disk.checkpoint import EMBEDDED
from quire.model.draft_sizes import AssistantSizes
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.find import read_spec
from quire.model.layer_sizes import LayerInputs, Ngrams, Streams
from quire.model.load.roles import ROLES, Share, parameter_count, shard
from quire.model.mixers.layer_mixers import kv_bytes_per_token
from quire.model.role import COLUMNS, ROWS, WHOLE
from quire.model.spec import MLA, ChannelSizes, ConvSizes, MoE, ScanSizes, SharedBlocks
from quire.model.tower_sizes import Connector, Patches
from quire.ops.arrays import to_numpy
from quire.ops.backend import Ops
from quire.ops.entries import EntrySizes
from quire.ops.experts import Routing
from quire.ops.indexer import BlockIndexer, Indexer, PooledIndexer
from quire.ops.native import load_native
from quire.ops.weights import Weight
from quire.plan.weights import weight_bytes
from quire.quant.base import QWeight
from quire.quant.dense import Dense
from quire.quant.registry import QUANTIZERS
from quire.quant.rtn import INT4, INT8
from torch_weights import load_torch, quantize_torch

SCHEMES = [INT8, INT4]
native = load_native()


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(seed)) * 0.05


def dense(w: Tensor) -> QWeight:
    return load_torch(Dense(), {"weight": w}, torch.float32)


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return over_torch(backend(request.param))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_number_is_within_half_a_step(scheme: Any, group: int) -> None:
    w = normal(70, 256)
    q = quantize_torch(scheme, w, group)
    codes, scales = q.weight.codes, q.weight.scales.float()
    assert codes.min() == scheme.low and codes.max() == scheme.high
    steps = ((q.dequantize() - w).view(70, -1, group) / scales[..., None]).abs().flatten(1)
    inside = (codes > scheme.low) & (codes < scheme.high)
    assert float(steps[inside].max()) <= 0.501, "a number is not at its nearest code"
    assert float(steps.max()) <= (0.6 if scheme is INT8 else 2.01), "clipped further than the widest scale tried allows"
    assert q.nbytes == 70 * 256 * scheme.bits // 8 + 70 * 256 // group * 2


@pytest.mark.parametrize(("scheme", "bound"), [(INT8, 0.0054), (INT4, 0.084)])
def test_error_on_normal_weights_of_group_32(scheme: Any, bound: float) -> None:
    w = normal(512, 1024)
    error = float((quantize_torch(scheme, w, 32).dequantize() - w).norm() / w.norm())
    assert 0.97 * bound < error < bound


def test_best_of_several_scales_beats_each_alone() -> None:
    w = normal(512, 1024)
    best = float((quantize_torch(INT4, w, 32).dequantize() - w).square().sum())
    for divisor in INT4.divisors:
        alone = quantize_torch(replace(INT4, divisors=(divisor,)), w, 32)
        assert best < 0.95 * float((alone.dequantize() - w).square().sum())


def test_outlier_channel_costs_only_its_own_group(ops: Ops) -> None:
    """One input channel x300 (Dettmers et al. 2022): the other groups' part of the result keeps its precision."""
    w, x = normal(64, 512), torch.randn((8, 512), generator=torch.Generator().manual_seed(1))
    x[:, 100] *= 300
    rest = torch.ones(512)
    rest[96:128] = 0
    want = (x * rest) @ w.t()
    ops.begin_step()
    whole = ops.linear(x, quantize_torch(INT8, w, 32).pack(ops), None).clone()
    alone = ops.linear((x * (1 - rest)).contiguous(), quantize_torch(INT8, w, 32).pack(ops), None).clone()
    assert float((whole - alone - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_special_values(scheme: Any) -> None:
    zeros = quantize_torch(scheme, torch.zeros(3, 64), 32)
    assert torch.equal(zeros.dequantize(), torch.zeros(3, 64))
    tiny = quantize_torch(scheme, torch.full((3, 64), 1e-12), 32)
    assert bool(torch.isfinite(tiny.dequantize()).all())
    for bad in (float("nan"), float("inf"), 3e9):
        w = normal(3, 64)
        w[1, 40] = bad
        with pytest.raises(ModelError, match="nan, inf"):
            quantize_torch(scheme, w, 32)
    with pytest.raises(ConfigError, match="704 columns"):
        quantize_torch(scheme, torch.zeros(2, 704), 128)


@pytest.mark.skipif(native is None, reason="quire._native is not built")
@pytest.mark.parametrize("unit", native.units() if native else [])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_native_rounding_is_the_definition_to_the_bit(
    scheme: Any, dtype: torch.dtype, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native is not None
    w = normal(40, 512)
    w[3, :64], w[4, 5], w[5], w[6] = 0, 2e-9, w[5] * 1e-7, w[6] * 1e6
    w[7, 32:64], w[8] = 0.25 * (-1) ** torch.arange(32), w[8].round(decimals=1)  # extremes of both signs
    w = w.to(dtype)
    codes, scales = np.empty((40, 512), np.int8), np.empty((40, 8), np.float16)
    assert scheme._reference(to_numpy(w), 64, codes, scales)
    monkeypatch.setattr("quire.quant.rtn.best_ops", lambda: native.ops(unit))
    got = scheme.quantize(to_numpy(w), 64).weight
    assert np.array_equal(got.codes, codes) and np.array_equal(got.scales, scales)


@pytest.mark.parametrize("make", [dense, lambda w: quantize_torch(INT8, w, 32), lambda w: quantize_torch(INT4, w, 64)])
def test_layout_operations_agree_with_the_dense_matrix(make: Any) -> None:
    a, b = make(normal(8, 128, 1)), make(normal(5, 128, 2))
    whole = QWeight.cat_rows([a, b])
    assert whole.shape == (13, 128) and whole.nbytes == a.nbytes + b.nbytes
    full = torch.cat((a.dequantize(), b.dequantize()))
    assert torch.equal(whole.dequantize(), full)
    order = torch.tensor([12, 0, 5, 5])
    assert torch.equal(whole.take_rows(order).dequantize(), full[order])
    assert torch.equal(whole.take_rows(slice(2, 9)).dequantize(), full[2:9])
    assert torch.equal(whole.slice_cols(64, 128).dequantize(), full[:, 64:128])
    if whole.weight.group:
        with pytest.raises(ConfigError, match="group borders"):
            whole.slice_cols(16, 128)
        with pytest.raises(ConfigError, match="cannot fuse"):
            QWeight.cat_rows([a, dense(normal(5, 128))])


def test_zeros_take_part_in_the_layout_operations() -> None:
    codes = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (6, 2), dtype=torch.int8)
    w = QWeight(Weight("int4", codes, torch.rand(6, 2).half(), zeros, 32))
    full = w.dequantize()
    assert torch.equal(QWeight.cat_rows([w.take_rows(slice(3, 6)), w]).slice_cols(32, 64).dequantize(),
                       torch.cat((full[3:], full))[:, 32:])  # fmt: skip


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
SPEC = read_spec(SHAPE | {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 96}, "config.json")[0]
INDEXER, BLOCKS = Indexer(4, 32, 8, (True, True)), BlockIndexer(16, 4, 2, 1, (True, True))
SPEC = replace(
    SPEC,
    moe=MoE(Routing(4, 2), 64, (True, True), 64, latent=32),
    mla=MLA(64, 64, 32, 16, 16, indexer=INDEXER),
    blocks=BLOCKS,
)
SPEC = replace(SPEC, shared=SharedBlocks(2, 32, True))
SPEC = replace(SPEC, conv=ConvSizes(64, 3), delta=DeltaSizes(2, 4, 32, 16, 4, 32, True, True))
SPEC = replace(SPEC, scan=ScanSizes(4, 32, 2, 16, 4), channels=ChannelSizes(64, 16, 32, 4))
SPEC = replace(SPEC, patches=Patches(8), connector=Connector(64, 2, 256, 256, 128))
SPEC = replace(SPEC, inputs=LayerInputs(32, 96), streams=Streams(4, 32, gate_rank=32))
SPEC = replace(SPEC, assistant=AssistantSizes(64, 8, 2), ngrams=Ngrams(0, 3, 2, 64, 4))
SPEC = replace(SPEC, pooled=PooledIndexer(4, 32, 16, 64, (True, True)))
SPEC = replace(SPEC, entries=EntrySizes(64, 16, 2, 32, 16, (4, 16), (True, False), 4, 32, 8))


@pytest.mark.parametrize("make", [dense, lambda w: quantize_torch(INT8, w, 32)])
@pytest.mark.parametrize("role", [name for name, role in ROLES.items() if role.kind == "linear"])
def test_shards_of_every_linear_role_make_the_whole(role: str, make: Any) -> None:
    shape = ROLES[role].shape(SPEC)
    weight, bias = make(normal(*shape)), torch.randn(shape[0])
    x = torch.randn(3, shape[1])
    want = x @ weight.dequantize().t() + bias
    assert shard(weight, bias, role, SPEC, Share()) == (weight, bias)
    parts = []
    for rank in range(2):
        w, b = shard(weight, bias, role, SPEC, Share(rank, 2))
        cut = x.chunk(2, 1)[rank] if ROLES[role].shard == COLUMNS else x
        parts.append(cut @ w.dequantize().t() + (0 if b is None else b))
    joined = {COLUMNS: lambda: parts[0] + parts[1], ROWS: lambda: torch.cat(parts, 1), WHOLE: lambda: parts[1]}
    got = joined[ROLES[role].shard]()
    torch.testing.assert_close(got, want)


def test_shard_never_cuts_a_head_and_replicates_few_kv_heads() -> None:
    k = dense(normal(32, 64))
    ranks = [shard(k, None, "k", SPEC, Share(rank, 4))[0].dequantize() for rank in range(4)]
    assert torch.equal(ranks[0], ranks[1]) and torch.equal(torch.cat((ranks[0], ranks[2])), k.dequantize())
    with pytest.raises(ConfigError, match="4 attention heads cannot be split"):
        shard(dense(normal(64, 64)), None, "q", SPEC, Share(0, 3))


def test_memory_formulas() -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    spec = read_spec(llama | {"intermediate_size": 11008, "vocab_size": 32000}, "config.json")[0]
    assert kv_bytes_per_token(spec, F16) * 4096 == 2 << 30
    assert parameter_count(spec) == 6_738_415_616
    assert weight_bytes(parameter_count(spec), 16) == 2 * 6_738_415_616
    assert weight_bytes(1 << 20, 4 + 16 / 32) == (1 << 20) * 9 // 16


def load(folder: Path, ops: Ops, **options: Any) -> Model:
    return load_model(flat_config(model=str(folder), **options), ops)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "bound"), [("int8", 0.03), ("int4", 0.4)])
def test_quantized_model_stays_near_the_original(name: str, bound: float, tied: bool, ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "llama", attention_bias=True, tie_word_embeddings=tied)
    model = load(tmp_path, ops, quantization=name)
    tokens = prompt(19, 1)
    (got,) = Paged(model, [tokens]).run([[19]])
    assert 1e-5 < relative_error(got, logits(oracle, tokens)) < bound
    assert model.report["q+k+v"][0] == model.report["down"][0] == f"{name} g32"
    assert model.report["head"][0] == "int8 g32" and model.report["embed"][0] == "float32"
    exact = load(tmp_path, backend("reference"), quantization=name)
    (want,) = Paged(exact, [tokens]).run([[19]])
    # Sums that differ in the last bit round to another int8 activation here and there, one step of 127 each.
    assert relative_error(got, want) < 1e-2


def test_eight_bits_in_the_head_pay() -> None:
    """KL divergence from the float32 model's next-token distributions on Python sources: why int4 has an int8 head."""
    ops, found = backend(BACKENDS[-1]), {}
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    texts = [
        Path(sysconfig.get_paths()["stdlib"], f"{m}.py") for m in ("bisect", "shelve", "tabnanny", "getopt", "wave")
    ]
    sequences = [tokenizer.encode(t.read_text()).ids[:200] for t in texts]
    for label, head in (("float32", None), ("head int8", INT8), ("head int4", None)):
        target = None if label == "float32" else replace(INT4, head_scheme=head)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(QUANTIZERS, "probe", target)  # type: ignore[arg-type]
            model = load_model(flat_config(dtype="float32", quantization="probe" if target else None), ops)
        outs = [Paged(model, [s]).run([[200]])[0].log_softmax(-1) for s in sequences]
        exact = found.setdefault("exact", outs)
        found[label] = torch.stack(
            [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(exact, outs, strict=True)]
        ).mean()
    assert float(found["head int8"]) < 0.95 * float(found["head int4"])


def test_every_quantizer_names_itself() -> None:
    assert {name: q.name for name, q in QUANTIZERS.items()} == {n: n for n in ("int8", "int4", "nf4", "mxfp4", "fp8")}
    assert INT4.head is INT8 and INT8.head is INT8


def test_formats_are_read_and_made_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from quire.core.dtypes import BF16
from quire.quant.base import QWeight
from quire.quant.gptq import Gptq
from quire.quant.registry import DENSE, QUANTIZERS, load
w = np.random.default_rng(0).standard_normal((32, 256), np.float32)
dense = load(DENSE, {"weight": w}, BF16, 0)
words, zeros = np.zeros((32, 32), np.int32), np.zeros((2, 4), np.int32)
parts = {"qweight": words, "qzeros": zeros, "scales": np.ones((2, 32), np.float16)}
made = [q.quantize(w, 64) for q in QUANTIZERS.values()] + [dense, load(Gptq(4, 128, True, True), parts, BF16, 0)]
for weight in made:
    rows = QWeight.cat_rows([weight.take_rows(np.array([3, 1])), weight.take_rows(slice(4, 6))])
    found = rows.slice_cols(0, 128).dequantize()
    assert np.array_equal(found, weight.dequantize()[[3, 1, 4, 5], :128]), weight.label
"""
    subprocess.run([sys.executable, "-c", code], check=True)
